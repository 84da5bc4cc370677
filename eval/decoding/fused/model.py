"""A transformers causal LM whose decoder layers run fused kernels on the engine's own KV buffers.

Only the layers, the final norm, the output matrix and plain embeddings are replaced (layers.py). transformers'
own code runs the rest: rotary tables, soft-caps, scales. What the layers consist of is found by watching them, and each
fused layer is compared with its original in float32 (proof.py). Then all parts are compared with the original's, in
the model's dtype, on random tokens. A model where something differs is refused. All parameters are shared with the
original.
Shape legend: B batch, M tokens of a forward, R = B · M rows, D hidden, k streams, V vocabulary.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from headstart.eval.decoding.cache import Buffers
from headstart.eval.decoding.fused.errors import Unfusable
from headstart.eval.decoding.fused.layers import (
    FusedEmbedding,
    FusedHead,
    FusedLayer,
    FusedNorm,
    Pass,
    PassHolder,
)
from headstart.eval.decoding.fused.proof import check_model, find_layers
from headstart.eval.kernels.attention import Visibility
from headstart.eval.kernels.choices import Choices, compile_ways, decide_ways
from headstart.eval.kernels.flat import FlatRows
from headstart.eval.kernels.launch import compile_ahead, graph_time, wait_compiled
from headstart.eval.kernels.linear import Linear, row_bucket
from headstart.eval.kernels.ways import Measured
from headstart.heads.errors import in_one_line
from headstart.heads.targets.locate import decoder_layers, record_layer_inputs, text_decoder

W = TypeVar("W")

#: bytes of the attention's output projection (o_proj) that the attention kernel may prefetch; `choose_ways` takes the
#: fastest
PREFETCH_BYTES = (0, 8 << 20, 16 << 20, 32 << 20)
#: slots of context, and fewest layers in a row, that `choose_ways` times kernels with
CONTEXT = 512
STACKED = 4


def shallow_copy(module: nn.Module) -> nn.Module:
    """A copy of all module objects, without hooks, that shares the parameters and buffers."""
    twin = copy.copy(module)
    for name in [name for name in module.__dict__ if name.startswith("_forward") and "hooks" in name]:
        twin.__dict__[name] = type(module.__dict__[name])()
    twin.__dict__["_modules"] = {
        name: None if child is None else shallow_copy(child) for name, child in module._modules.items()
    }
    return twin


class FusedModel:
    """A causal LM for decoding on explicit KV buffers.

    Args:
        model: transformers causal LM in eval mode.
        windows: attention kind → window, as engine.attention_windows gives.
        choices: the fastest kernels of products on this card. `choose_ways` reads them and adds to them; None = it
            always measures.
    Raises: Unfusable when a layer's structure is not covered, the outputs differ, or anything fails on the way: also
        where there is no memory for a layer in float32.

    Attributes:
        uncaptured: why a cycle with this model could not be captured as a CUDA graph; None while all could.
    """

    uncaptured: str | None = None

    def __init__(self, model: nn.Module, windows: dict[str, int | None], choices: Choices | None = None):
        try:
            self._fuse(model, windows, choices)
        except Unfusable:
            raise
        except Exception as error:
            raise Unfusable(f"while fusing {type(model).__name__}: {in_one_line(error)}") from error

    def _fuse(self, model: nn.Module, windows: dict[str, int | None], choices: Choices | None) -> None:
        places = {str(parameter.device) for parameter in model.parameters()}
        if len(places) > 1:
            raise Unfusable(f"its layers are on several devices: {', '.join(sorted(places))}")
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            raise Unfusable("its parameters are sharded")
        self.windows, self.choices, self._holder = windows, choices, PassHolder()
        config = model.config.get_text_config()
        kinds = getattr(config, "layer_types", None) or [next(iter(windows))] * config.num_hidden_layers
        self.view = shallow_copy(model)
        layers = decoder_layers(self.view)
        width, final, facts = find_layers(self.view, [windows[kind] for kind in kinds])
        self.layers = [
            FusedLayer(layer, facts[n], n, self._holder, windows[kinds[n]]) for n, layer in enumerate(layers)
        ]
        for n, layer in enumerate(self.layers):
            layers[n] = layer
        decoder = text_decoder(self.view)
        self.norm = FusedNorm(decoder.get_submodule(final), width, self._holder, model.device)
        decoder.set_submodule(final, self.norm)
        following = [*(later.input_norm for later in self.layers[1:]), self.norm.norm]
        for layer, norm in zip(self.layers, following, strict=True):
            layer.next_norm = norm
        self.head = FusedHead(self.view.get_output_embeddings())
        self.view.set_output_embeddings(self.head)
        embedding = self.view.get_input_embeddings()
        # other embeddings scale the rows that they look up, or renormalise them
        if type(embedding) is nn.Embedding and embedding.max_norm is None:
            self.view.set_input_embeddings(FusedEmbedding(embedding))
        self.device, self.dtype = model.device, model.dtype
        # fused layers ignore the mask; a 4-D one keeps transformers from building its own
        none = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=self.device)
        self._mask = {kind: none for kind in windows} if len(windows) > 1 else none
        check_model(self, model)

    @property
    def mixes(self) -> bool:
        """Whether a layer's MLP runs as it is: a mixture, whose choice of experts may change with rounding."""
        return any(not layer.mlp.linears() for layer in self.layers)

    def linears(self) -> list[Linear]:
        return [self.head.linear, *(linear for layer in self.layers for linear in layer.linears())]

    def compile_ways(self, rows: int) -> None:
        """Compile the kernels that `choose_ways(rows)` would time."""
        kept = compile_ways(self.linears(), rows, self.choices, self._about)
        if kept is not None:
            self._set_prefetch(rows, kept.hidden_bytes)

    @property
    def _about(self) -> str:
        """What choices depend on besides the products: the attention heads between them."""
        rope = self.layers[0].attention.rope
        return f"{rope.heads} heads, {rope.kv_heads} of keys, of {rope.head_dim}"

    def choose_ways(self, rows: int) -> dict[str, float]:
        """Choose the kernels for products of `rows` rows: as `choices` say, else by measurement (CUDA only).

        Returns: "N×K[ activation] rows" → microseconds of the chosen kernel when it runs alone.
        """
        chosen = decide_ways(self.linears(), rows, self.choices, self._about, self._choose_in_layers)
        if chosen is None:
            return {}
        self._set_prefetch(rows, chosen.hidden_bytes)
        return {f"{name} {rows}": microseconds for name, microseconds in chosen.microseconds.items()}

    def _set_prefetch(self, rows: int, size: int) -> None:
        """Let attention prefetch `size` bytes of its output projection while it leaves the memory idle."""
        for layer in self.layers:
            layer.attention.prefetch_bytes[row_bucket(rows)] = size

    def _choose_in_layers(self, products: list[Measured], rows: int) -> int:
        """Choose among the kernels that are about equally fast alone, and the bytes that attention prefetches.

        Both are timed in layers that run one after the other, where a kernel is launched and prefetches while others
        still run. Returns: the bytes.
        """
        layers = self._stacked()
        run = self._stack(layers, rows)

        def choose_fastest(ways: Iterable[W], choose: Callable[[W], None]) -> None:
            times, ways = {}, list(ways)

            def all_ways() -> None:
                for way in ways:
                    choose(way)
                    run()

            compile_ahead(all_ways)
            wait_compiled()
            for way in ways:
                choose(way)
                times[way] = graph_time(run, 15)
            choose(min(times, key=lambda way: times[way]))

        for measured in products:
            if len(measured.close) > 1 and any(linear in measured.linears for linear in layers[0].linears()):
                choose_fastest(measured.close, partial(measured.choose, rows))
        choose_fastest(PREFETCH_BYTES, partial(self._set_prefetch, rows))
        return self.layers[0].attention.prefetch_bytes[row_bucket(rows)]

    def _stacked(self) -> list[FusedLayer]:
        """So many layers that their weights do not fit into the cache: in a whole model they come from memory."""
        weights = sum(linear.weight_NK.nbytes for linear in self.layers[0].linears())
        cache = torch.cuda.get_device_properties(self.device).L2_cache_size if self.device.type == "cuda" else 0
        return self.layers[: max(STACKED, -(-2 * cache // weights))]

    def _stack(self, layers: list[FusedLayer], rows: int) -> Callable[[], Tensor]:
        """Runs `rows` tokens through the given layers, after a context of CONTEXT slots."""
        buffers = self.buffers(1, CONTEXT + rows)
        position_BM = CONTEXT + torch.arange(rows, device=self.device)[None]
        visibility = Visibility(position_BM, position_BM, position_BM[:, 0])
        given: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        handle = layers[0].register_forward_pre_hook(
            lambda _, args, kwargs: given.append((args, kwargs)), with_kwargs=True
        )
        try:
            self.forward(position_BM.new_zeros(1, rows), visibility, buffers)
        finally:
            handle.remove()
        args, kwargs = given[0]
        bound = inspect.signature(layers[0].forward).bind(*args, **kwargs)
        first_BMD, others = bound.args[0], bound.args[1:]

        @torch.inference_mode()
        def run() -> Tensor:
            self._holder.current = Pass(visibility, buffers)
            try:
                x_BMD: Tensor = first_BMD
                for layer in layers:
                    x_BMD = layer(x_BMD, *others, **bound.kwargs)
            finally:
                self._holder.current = None
            return x_BMD

        return run

    def buffers(self, batch: int, capacity: int) -> Buffers:
        """Buffers for `batch` rows of `capacity` slots."""
        shapes = [(layer.attention.rope.kv_heads, layer.attention.rope.head_dim) for layer in self.layers]
        return Buffers(shapes, batch, capacity, self.dtype, self.device)

    @torch.inference_mode()
    def forward(
        self,
        tokens_BM: Tensor,
        visibility: Visibility,
        buffers: Buffers,
        layer_ids: tuple[int, ...] = (),
        last_only: bool = False,
        flat: FlatRows | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """One pass: writes keys and values, returns (logits [B, M or 1, V], hidden [B, M, D] post-norm,
        streams [B, M, k, D] or None).

        Args: flat: only these rows are computed, and the results are theirs: [F, V], [F, D], [F, k, D]. Cut places must
            be padding in `visibility`.
        """
        if flat is not None:
            return self._flat_forward(tokens_BM, visibility, buffers, layer_ids, flat)
        return self._run(tokens_BM, visibility.position_BM, Pass(visibility, buffers), layer_ids, last_only)

    def _flat_forward(
        self, tokens_BM: Tensor, visibility: Visibility, buffers: Buffers, layer_ids: tuple[int, ...], flat: FlatRows
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """`forward` on flat rows, as a batch of one sequence."""
        tokens_1F, position_1F = (x.flatten()[flat.place_F][None] for x in (tokens_BM, visibility.position_BM))
        run = Pass(visibility, buffers, flat=flat)
        logits, hidden, streams = self._run(tokens_1F, position_1F, run, layer_ids, last_only=False)
        return logits[0], hidden[0], None if streams is None else streams[0]

    def _run(
        self, tokens_BM: Tensor, position_BM: Tensor, run: Pass, layer_ids: tuple[int, ...], last_only: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The layers and what stands around them. Returns: as `forward`."""
        self._holder.current = run
        try:
            with record_layer_inputs(self.view, layer_ids) as captured:
                output = self.view(
                    input_ids=tokens_BM,
                    position_ids=position_BM.clamp(min=0),
                    attention_mask=self._mask,
                    use_cache=False,
                    logits_to_keep=1 if last_only else 0,
                )
        finally:
            self._holder.current = None
        streams = torch.stack([captured[k] for k in layer_ids], 2) if layer_ids else None
        return output.logits, self.norm.last, streams
