"""Answers for distillation, made by the decode engine: plain decoding, in captured cycles where the target is fused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from headstart.data.config import DistillConfig
from headstart.data.distilling.answering import Answer, Answerer, Request, Requests
from headstart.eval.config import EvalConfig
from headstart.eval.decoding.decode import slots_needed
from headstart.eval.decoding.engine import Engine
from headstart.eval.decoding.session import Decoder
from headstart.eval.decoding.stream import Stream
from headstart.heads.targets.target import Target

#: batches' worth of requests whose longest prompt the buffers must hold, where they cannot hold the longest of all
AHEAD = 4
#: bytes of keys and values that are not too many on a CPU
CPU_BYTES = 1 << 30


class EngineAnswerer(Answerer):
    """Answers requests on the decode engine, `data.distill.batch_size` at a time, with continuous batching.

    Args: engine: see `eval.engine`.
    Attributes: decoder: has the buffers and the captured cycles.
    Raises: TargetError for a target that the engine does not cover.
    """

    def __init__(self, target: Target, config: DistillConfig, engine: str = "auto"):
        self.target, self.config = target, config
        sampling = {"temperature": config.temperature, "top_k": config.top_k, "top_p": config.top_p}
        self.decoder = Decoder(target, EvalConfig(drafter="none", engine=engine, **sampling))  # type: ignore[arg-type]
        if self.decoder.fused is None:
            Engine(target.model, 1, 2)  # refuses what it does not cover

    def answers(self, requests: Requests) -> Iterator[Answer]:
        decoder = self.decoder
        while waiting := requests.peek(1 << 62):
            stream = self._stream(requests, waiting)
            try:
                yield from stream.answers()
            except Exception as error:  # noqa: BLE001 - what cannot be helped is raised again
                yield from stream.give()
                decoder.go_on_unfused(error)
                requests.put_back(stream.in_flight)
            decoder.uncaptured = decoder.uncaptured or stream.engine.uncaptured
            del stream  # it holds buffers, which go before larger ones are made

    def _stream(self, requests: Requests, waiting: list[Request]) -> Stream:
        """A batch whose buffers fit what waits, or at least what comes next."""
        config, decoder = self.config, self.decoder
        rows, capacity = min(len(waiting), config.batch_size), 0
        if decoder.engine is not None:  # graphs are of one batch size
            rows, capacity = max(rows, decoder.engine.batch), decoder.engine.capacity
        needed = self._slots(waiting)
        if needed > capacity:
            needed = max(needed, capacity * 3 // 2)  # later questions grow
        if not self._has_room(rows, needed):
            needed = self._slots(waiting[: AHEAD * rows])
            # a CPU's memory is everybody's, and more rows at a time make it little faster
            while decoder.engine is None and self.target.device.type == "cpu" and rows > 1:
                if self._has_room(rows, needed):
                    break
                rows = -(-rows // 2)
        engine = decoder.engine_for(rows, needed)
        stops = set(self.target.stop_token_ids)
        return Stream(engine, requests, decoder.sampling, config.max_new_tokens, stops, graphs=decoder.graphs)

    def _slots(self, requests: Sequence[Request]) -> int:
        longest = max(len(request.prompt_ids) for request in requests)
        return slots_needed(longest, self.config.max_new_tokens, None)

    def _has_room(self, rows: int, slots: int) -> bool:
        """Whether buffers of so many slots take a smaller part of the free memory."""
        dims, device = self.target.dims, self.target.device
        per_slot = 2 * dims.num_layers * dims.num_kv_heads * dims.head_dim * self.target.model.dtype.itemsize
        free = torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else CPU_BYTES
        return rows * slots * per_slot <= free
