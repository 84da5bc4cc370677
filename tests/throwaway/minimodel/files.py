"""The draft model on disk: no engine serves it."""

from __future__ import annotations

from headstart.heads.checkpoints.head_files import HeadFiles
from headstart.heads.families.paper import Paper

PAPER = Paper(
    method="Speculative decoding with a draft model",
    title="Fast Inference from Transformers via Speculative Decoding",
    authors="Leviathan, Yaniv and Kalman, Matan and Matias, Yossi",
    arxiv="2211.17192",
)


class MiniModelFiles(HeadFiles):
    has_rope = True
