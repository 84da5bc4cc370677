"""Answers for distillation, made by the decode engine: plain decoding, in captured cycles where the target is fused."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from headstart.data.answering import Answer, Answerer, Requests
from headstart.data.config import DistillConfig
from headstart.eval.config import EvalConfig
from headstart.eval.decoding.decode import QUEUED
from headstart.eval.decoding.session import Decoder
from headstart.heads.targets.target import Target


class EngineAnswerer(Answerer):
    """Answers requests `data.distill.batch_size` at a time, on one set of buffers and graphs.

    Args: engine: see `eval.engine`.
    """

    def __init__(self, target: Target, config: DistillConfig, engine: str = "auto"):
        self.config = config
        sampling = {"temperature": config.temperature, "top_k": config.top_k, "top_p": config.top_p}
        self.decoder = Decoder(target, EvalConfig(drafter="none", engine=engine, **sampling))  # type: ignore[arg-type]

    def answers(self, requests: Requests) -> Iterator[Answer]:
        config, device = self.config, self.decoder.target.device
        while batch := requests.take(config.batch_size * QUEUED):
            # a short batch is filled up with one-token answers: another batch size would need other graphs
            missing = max(config.batch_size - len(batch), 0)
            contexts = [list(request.prompt_ids) for request in batch] + [[batch[0].prompt_ids[0]]] * missing
            limits = [config.max_new_tokens] * len(batch) + [1] * missing
            seeds = [request.seed for request in batch] + [0] * missing
            drawn = None if config.temperature == 0 else torch.tensor(seeds, dtype=torch.int64, device=device)
            decoded = self.decoder.run(contexts, None, limits, 0, row_seeds=drawn, rows=config.batch_size)
            for request, answer in zip(batch, decoded.answers, strict=False):
                yield Answer(request, tuple(answer.tokens), answer.finish_reason)
