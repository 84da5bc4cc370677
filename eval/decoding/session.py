"""A target that decodes batch after batch, with one engine, its captured cycles and kernel choices."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from headstart.eval.config import EvalConfig
from headstart.eval.decoding.decode import Decoded, Watch, decode, round_up_slots, slots_needed
from headstart.eval.decoding.drafter import Drafter
from headstart.eval.decoding.engine import Engine, attention_windows
from headstart.eval.decoding.fused.errors import Unfusable
from headstart.eval.decoding.fused.model import FusedModel
from headstart.eval.decoding.graphs import CycleGraphs
from headstart.eval.decoding.sampling import Sampling
from headstart.eval.decoding.scheduler import KEEP_ALL, Scheduler
from headstart.eval.kernels.choices import Choices
from headstart.heads.errors import ConfigError, HeadstartError, in_one_line
from headstart.heads.targets.target import Target

#: without fused kernels, attention reads the buffers up to the next multiple of this many slots
KV_BUCKET = 128


class Decoder:
    """A target's engine, made anew when a batch does not fit, and shared by plain and speculative decoding.

    Whatever fails while the target is fused, or while it decodes fused, makes transformers' own forward run instead.
    Only running out of memory while it decodes is reported as it is: that path would need as much.

    Attributes:
        unfused: why the target runs by transformers' own forward although `eval.engine` is auto and there is a GPU;
            else None.
        uncaptured: why cycles of transformers' own forward could not be captured; None while all could.
        graphs: captured cycles.
        watch: is told how far a batch is (see `decode`), or None.
    """

    def __init__(self, target: Target, config: EvalConfig):
        self.target, self.config = target, config
        self.sampling = Sampling.from_config(config)
        self.engine: Engine | None = None
        self.unfused: str | None = None
        self.uncaptured: str | None = None
        self.fused = self._fuse()
        self.graphs = CycleGraphs()
        self.watch: Watch | None = None
        # one generator for all runs: captured graphs hold on to it
        self.generator = torch.Generator(target.device)

    def _fuse(self) -> FusedModel | None:
        kind, model = self.config.engine, self.target.model
        if kind == "transformers" or (kind == "auto" and self.target.device.type != "cuda"):
            return None
        try:
            device, choices = self.target.device, None
            if device.type == "cuda":
                choices = Choices.of(device, fresh=self.config.measure_kernels)
            return FusedModel(model, attention_windows(model.config), choices)
        except HeadstartError:
            raise
        except Exception as error:  # noqa: BLE001 - the target still runs by its own forward
            self._give_up_fused(error)
            return None

    def _give_up_fused(self, error: Exception) -> None:
        """Keep the reason. Raises: ConfigError where `eval.engine` asks for the fused form."""
        reason = str(error) if isinstance(error, Unfusable) else in_one_line(error)
        if self.config.engine == "fused":
            raise ConfigError(f"eval.engine: found 'fused', but {reason}; set eval.engine=transformers") from error
        self.unfused, self.fused = reason, None

    @property
    def path(self) -> str:
        """"fused" (our kernels), or "generic" (transformers' own forward on our buffers)."""
        return "generic" if self.fused is None else "fused"

    @property
    def slow(self) -> str | None:
        """Why the target decodes slower than it could, for reports; None where it does not, or where that was asked."""
        if self.unfused is not None:
            how = "" if self.uncaptured is None else f", operation by operation ({self.uncaptured})"
            return f"the target ran by transformers' own forward{how}: {self.unfused}"
        if self.fused is not None and self.fused.uncaptured is not None:
            return f"decoding cycles ran operation by operation, not as CUDA graphs: {self.fused.uncaptured}"
        if self.engine is not None and self.engine.prompts.uncaptured is not None:
            return f"prompts ran operation by operation, not as CUDA graphs: {self.engine.prompts.uncaptured}"
        return None

    @property
    def _capturable(self) -> bool:
        """Whether cycles of transformers' own forward are captured: it lies on one GPU as a whole, and none failed."""
        if self.fused is not None or self.config.engine != "auto" or self.uncaptured is not None:
            return False
        tensors = [*self.target.model.parameters(), *self.target.model.buffers()]
        places = {tensor.device for tensor in tensors}
        sharded = any(isinstance(tensor, DTensor) for tensor in tensors)
        return len(places) == 1 and self.target.device.type == "cuda" and not sharded

    def limits(self, contexts: list[list[int]]) -> list[int]:
        """New tokens of every row: `eval.max_new_tokens`, or as many as the target's positions leave (one at least)."""
        most, positions = self.config.max_new_tokens, self.target.positions
        return [max(min(most, positions - len(context)), 1) for context in contexts]

    def gap(self, context: list[int]) -> float:
        """The target's top-1 minus top-2 logit after a context."""
        engine = Engine(self.target.model, 1, len(context) + 1, fused=self.fused)
        top = engine.prefill([context])[0].float().topk(2).values[0]
        return float(top[0] - top[1])

    def drop_buffers(self) -> None:
        """Let go of the engine; the next run makes a new one."""
        self.engine = None

    def run(
        self,
        contexts: list[list[int]],
        drafter: Drafter | None,
        max_new_tokens: int | list[int],
        seed: int,
        row_seeds: Tensor | None = None,
        stop: bool = True,
        rows: int | None = None,
        scheduler: Scheduler = KEEP_ALL,
    ) -> Decoded:
        """`decode` on buffers that are large enough.

        Args:
            row_seeds: see `decode`.
            stop: False decodes on beyond the target's stop tokens, up to the limit.
            rows: contexts decoded at a time, where there are more of them; None = all.
            scheduler: see `decode`. Captured cycles are its own.
        """
        rows = len(contexts) if rows is None else min(rows, len(contexts))
        given = contexts, drafter, max_new_tokens, seed, row_seeds, stop, rows, scheduler
        try:
            return self._run(*given)
        except Exception as error:  # noqa: BLE001 - an error with another cause is raised again by the second run
            self.go_on_unfused(error)
        return self._run(*given)

    def go_on_unfused(self, error: Exception) -> None:
        """After an error in the fused form, decode by transformers' own forward from now on.

        Raises: the error itself where that would not help.
        """
        if isinstance(error, HeadstartError | torch.OutOfMemoryError) or self.fused is None:
            raise error
        self._give_up_fused(error)
        self.drop_buffers()
        self.graphs.clear()

    def engine_for(self, rows: int, needed: int) -> Engine:
        """An engine of so many rows, with at least so many KV slots: the one that is there if it fits."""
        engine = self.engine
        if engine is None or engine.batch != rows or engine.capacity < needed:
            # larger buffers live longer, and captured cycles with them; fused kernels read only the slots in use
            capturable = self._capturable
            lasting = self.fused is not None or capturable
            capacity = round_up_slots(needed) if lasting else -(-needed // KV_BUCKET) * KV_BUCKET
            # free the old buffers before the new ones are made
            self.engine = engine = None
            self.graphs.clear()
            self.engine = engine = Engine(self.target.model, rows, capacity, bucket=KV_BUCKET, fused=self.fused)
            engine.capturable = capturable
        return engine

    def _run(
        self,
        contexts: list[list[int]],
        drafter: Drafter | None,
        max_new_tokens: int | list[int],
        seed: int,
        row_seeds: Tensor | None,
        stop: bool,
        rows: int,
        scheduler: Scheduler,
    ) -> Decoded:
        longest_answer = max_new_tokens if isinstance(max_new_tokens, int) else max(max_new_tokens)
        needed = slots_needed(max(map(len, contexts)), longest_answer, drafter)
        engine = self.engine_for(rows, needed)
        self.generator.manual_seed(seed)
        stops = set(self.target.stop_token_ids) if stop else set()
        before = self.graphs.seconds
        decoded = decode(
            engine, contexts, drafter, self.sampling, max_new_tokens, stops, self.generator,
            graphs=self.graphs, row_seeds=row_seeds, scheduler=scheduler, watch=self.watch,
        )  # fmt: skip
        self.uncaptured = self.uncaptured or engine.uncaptured
        # the first batch on new buffers waits for a capture, which does not count as decoding
        preparing = self.graphs.seconds - before
        if preparing:
            decoded.decode_s -= preparing
            decoded.cycle_s[0] -= preparing
        return decoded
