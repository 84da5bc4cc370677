"""Answers for distillation, made by the decode engine: plain decoding, in captured cycles where the target is fused."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headstart.data.config import DistillConfig
from headstart.eval.config import EvalConfig
from headstart.eval.decoding.decode import QUEUED
from headstart.eval.decoding.session import Decoder
from headstart.heads.targets.target import Target


class EngineGenerator:
    """Generates like data.distill.generate, on one set of buffers and graphs for all batches.

    A short batch is filled up with one-token answers: another batch size would need other graphs. More prompts than
    `batch_size` are decoded that many at a time: a row that ended takes the next one.

    Args: engine: see `eval.engine`.
    Attributes: queued: batches' worth of prompts that it is best given at once.
    """

    queued = QUEUED

    def __init__(self, target: Target, config: DistillConfig, engine: str = "auto"):
        sampling = {"temperature": config.temperature, "top_k": config.top_k, "top_p": config.top_p}
        self.decoder = Decoder(target, EvalConfig(drafter="none", engine=engine, **sampling))  # type: ignore[arg-type]

    def __call__(
        self, target: Target, prompts: Sequence[Sequence[int]], config: DistillConfig, seeds: Sequence[int]
    ) -> list[list[int]]:
        """Args: as data.distill.generate's; `target` and `config` are those of the constructor."""
        missing = max(config.batch_size - len(prompts), 0)
        contexts = [list(prompt) for prompt in prompts] + [[prompts[0][0]]] * missing
        limits = [config.max_new_tokens] * len(prompts) + [1] * missing
        row_seeds = torch.tensor([*seeds, *[0] * missing], dtype=torch.int64, device=target.device)
        drawn = None if config.temperature == 0 else row_seeds
        decoded = self.decoder.run(contexts, None, limits, 0, row_seeds=drawn, rows=config.batch_size)
        return [answer.tokens for answer in decoded.answers[: len(prompts)]]
