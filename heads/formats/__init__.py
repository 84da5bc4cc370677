"""Head checkpoints on disk: ours, the engines', and everybody else's."""

from __future__ import annotations

from headstart.heads.formats.check import CheckReport, check_directory, check_embeddings
from headstart.heads.formats.config import ExportConfig
from headstart.heads.formats.export import check_export, export_head
from headstart.heads.formats.handling import EngineHandling, Handling
from headstart.heads.formats.hub import fetch_head, push_export
from headstart.heads.formats.loading import load_head
from headstart.heads.formats.portable import save_head

__all__ = [
    "CheckReport",
    "EngineHandling",
    "ExportConfig",
    "Handling",
    "check_directory",
    "check_embeddings",
    "check_export",
    "export_head",
    "fetch_head",
    "load_head",
    "push_export",
    "save_head",
]
