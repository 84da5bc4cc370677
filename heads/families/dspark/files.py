"""DSpark on disk."""

from __future__ import annotations

from headstart.heads.checkpoints.head_files import HeadFiles
from headstart.heads.families.paper import Paper

PAPER = Paper(method="DSpark", title="DSpark", authors="", arxiv="2607.05147")


class DSparkFiles(HeadFiles):
    """Tensors under their own names."""
