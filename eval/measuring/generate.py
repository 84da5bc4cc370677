"""HF `generate` at batch 1, against which most published speed-ups are measured. It is slow, and never our baseline."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from headstart.eval.decoding.sampling import Sampling
from headstart.eval.kernels.launch import synchronize
from headstart.eval.measuring.metrics import Timed
from headstart.heads.targets.target import Target

#: stands beside its numbers wherever they are shown
LABEL = "HF generate, not the baseline of the speed-up"


class GenerateBaseline:
    """Times `model.generate` on contexts, one at a time, with the evaluation's sampling and stop tokens."""

    def __init__(self, target: Target, sampling: Sampling, max_new_tokens: int):
        from transformers import GenerationConfig

        stops = list(target.stop_token_ids)
        sampled: dict[str, Any] = {}
        if not sampling.greedy:
            sampled = {
                "temperature": sampling.temperature,
                "top_k": sampling.top_k,
                "top_p": sampling.top_p,
                "min_p": sampling.min_p or None,
            }
        self.target, self.sampling = target, sampling
        self.config = GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=not sampling.greedy,
            repetition_penalty=sampling.repetition_penalty,
            eos_token_id=stops or None,
            pad_token_id=stops[0] if stops else 0,
            use_cache=True,
            **sampled,
        )
        self.timed = Timed()

    @torch.inference_mode()
    def run(self, context: list[int], seed: int = 0) -> list[int]:
        """Time one context; returns the tokens that were generated. Sampling takes torch's global generator, seeded."""
        device = self.target.device
        tokens_BT = torch.tensor([context], device=device)
        clock = _Arrivals()
        cuda = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=cuda, enabled=not self.sampling.greedy):
            if not self.sampling.greedy:
                torch.manual_seed(seed)
            synchronize(device)
            began = time.perf_counter()
            output = self.target.model.generate(
                tokens_BT, attention_mask=torch.ones_like(tokens_BT), generation_config=self.config, streamer=clock
            )
            synchronize(device)
        # the prompt is streamed first
        times = clock.times[1:]
        self.timed.prefill_s += times[0] - began
        self.timed.decode_s += times[-1] - times[0]
        self.timed.tokens += len(times) - 1
        self.timed.first_s.append(times[0] - began)
        self.timed.token_s += [after - before for before, after in zip(times, times[1:], strict=False)]
        return output[0, len(context) :].tolist()

    def report(self) -> dict[str, Any]:
        return {
            "label": LABEL,
            "prompts": len(self.timed.first_s),
            "tokens_per_s": self.timed.tokens_per_s,
            "latency": self.timed.latency(),
        }


class _Arrivals:
    """A streamer that notes when tokens arrive at the host."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass
