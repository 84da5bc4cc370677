"""Head checkpoints on disk: ours, the engines', and everybody else's."""

from __future__ import annotations

from headstart.heads.formats.config import ExportConfig
from headstart.heads.formats.portable import load_head, save_head

__all__ = ["ExportConfig", "load_head", "save_head"]
