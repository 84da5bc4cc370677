"""DFlash on disk."""

from __future__ import annotations

from headstart.heads.checkpoints.head_files import HeadFiles
from headstart.heads.families.paper import Paper

PAPER = Paper(method="DFlash", title="DFlash", authors="", arxiv="2602.06036")


class DFlashFiles(HeadFiles):
    """Tensors under their own names."""
