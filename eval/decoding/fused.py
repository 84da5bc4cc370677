"""A transformers causal LM whose decoder layers run fused kernels on the engine's own KV buffers.

Nothing of a model's code is copied: layers are recognised by the modules they hold (q/k/v/o projections, RMSNorms, a
gated MLP or any other), embeddings, rotary tables, output head, soft-caps and scales stay transformers' own, and a
model counts as fused only after its hidden states and logits have been compared with the original's on random tokens.
The fused model shares every parameter with the original: q, k, v and gate, up become views of one matrix each.
Shape legend: B batch, M tokens of a forward, R = B · M rows, D hidden, h query heads, g kv heads, d head dim,
V vocabulary.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from headstart.eval.kernels.attention import Ahead, AttendShape, Visibility, attend
from headstart.eval.kernels.choices import Choices, compile_ways, decide_ways
from headstart.eval.kernels.launch import compile_ahead, compiling, graph_time, wait_compiled
from headstart.eval.kernels.linear import MAX_ROWS, Linear, row_bucket
from headstart.eval.kernels.norm import NormWeights, rms_norm
from headstart.eval.kernels.rope_store import RopeStore, rope_store
from headstart.eval.kernels.rows import move_slots, take_rows_kernel
from headstart.eval.kernels.ways import Measured
from headstart.heads.kernels.device import wants_kernel
from headstart.heads.targets.locate import decoder_layers, record_layer_inputs, text_decoder

W = TypeVar("W")

#: largest relative distance (L2) between fused and original hidden states that passes as rounding
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}

#: how many bytes of the output projection attention may ask for, of which `choose_ways` takes the fastest
HIDDEN_BYTES = (0, 8 << 20, 16 << 20, 32 << 20)
#: layers that `choose_ways` times one behind the other, at least
STACKED = 4


class Unfusable(Exception):
    """The model has a structure that the fused layers do not cover; the message names it."""


class Buffers:
    """Zeroed key and value buffers of all layers, [B, g, S + 1, d] each; slot S is the bin that padding is written to.

    Zeros: a masked slot has weight 0, and 0 × garbage must not be NaN.

    Args: shapes: (kv heads, head dim) of every layer; layers of one shape share one allocation.
    """

    def __init__(
        self, shapes: list[tuple[int, int]], batch: int, capacity: int, dtype: torch.dtype, device: torch.device
    ):
        self.capacity = capacity
        self._wholes = [
            torch.zeros((shapes.count(shape), 2, batch, shape[0], capacity + 1, shape[1]), dtype=dtype, device=device)
            for shape in dict.fromkeys(shapes)
        ]
        rest = {shape: iter(whole) for shape, whole in zip(dict.fromkeys(shapes), self._wholes, strict=True)}
        pairs = [next(rest[shape]) for shape in shapes]
        self.keys, self.values = [pair[0] for pair in pairs], [pair[1] for pair in pairs]

    @property
    def bin(self) -> int:
        return self.capacity

    def move(self, source_BJ: Tensor, target_BJ: Tensor) -> None:
        """Copy slots `source` onto `target` in every layer (send what is not wanted to the bin)."""
        for whole in self._wholes:
            move_slots(whole, source_BJ, target_BJ)


@dataclass
class Pass:
    """What the layers of one forward share: where its tokens stand, and the buffers."""

    visibility: Visibility
    buffers: Buffers
    #: what the last layer returned [B, M, D], and the norm of it [R, D] that was made with it
    stream_BMD: Tensor | None = None
    made: tuple[NormWeights, Tensor] | None = None

    def norm(self, x_BMD: Tensor, norm: NormWeights) -> Tensor:
        """[R, D]: the norm of what comes into a layer, or the final one. A layer's result must not change in place."""
        if self.made is not None and x_BMD is self.stream_BMD and self.made[0] is norm:
            return self.made[1]
        return rms_norm(x_BMD.flatten(0, -2), norm)


class _Slot:
    """Holds the Pass of the forward that is running: transformers' top-level code knows nothing of it."""

    current: Pass | None = None
    #: rotary tables hold each angle once (gpt-oss) instead of twice; found at the first forward
    half_tables: bool | None = None


def norm_weights(norm: nn.Module) -> NormWeights:
    """Factor and eps of an RMSNorm module, found by what it does to vectors of known RMS.

    Raises: Unfusable when the module is something else.
    """
    weight, eps = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if weight is None or eps is None or getattr(norm, "bias", None) is not None:
        raise Unfusable(f"{type(norm).__name__} is no RMSNorm")
    with torch.no_grad():
        # the weight itself, or 1 + weight: whichever the module's output shows
        shown = norm(torch.ones_like(weight)).float()
        plain, shifted = weight.float(), weight.float() + 1
        factor = min((plain, shifted), key=lambda guess: float((guess - shown).abs().max()))
        if not torch.allclose(factor, shown, rtol=1e-2, atol=1e-2):
            raise Unfusable(f"{type(norm).__name__} multiplies by neither its weight nor 1 + its weight")
    return NormWeights(factor.contiguous(), float(eps))


def _merged(projections: list[nn.Module]) -> tuple[Tensor, Tensor | None]:
    """One matrix (and bias) holding several projections' rows; the projections' weights become views of it."""
    for projection in projections:
        if type(projection) is not nn.Linear:
            raise Unfusable(f"a projection is {type(projection).__name__}, expected nn.Linear")
    with_bias = [projection for projection in projections if projection.bias is not None]
    if with_bias and len(with_bias) != len(projections):
        raise Unfusable("some projections of a group have a bias and others none")

    def merge(parameters: list[nn.Parameter]) -> Tensor:
        sizes = [parameter.shape[0] for parameter in parameters]
        whole = _as_one(parameters)
        for parameter, part in zip(parameters, whole.split(sizes), strict=True):
            parameter.data = part
        return whole

    weight = merge([projection.weight for projection in projections])
    return weight, merge([projection.bias for projection in projections]) if with_bias else None


def _as_one(parameters: list[nn.Parameter]) -> Tensor:
    """The parameters end to end; without a copy when they are consecutive views already (an earlier fusion)."""
    first = parameters[0].data
    expected = first.data_ptr()
    for parameter in parameters:
        if parameter.data_ptr() != expected or not parameter.is_contiguous():
            return torch.cat([parameter.data for parameter in parameters])
        expected += parameter.numel() * parameter.element_size()
    if len(parameters) == 1:
        return first
    rows = sum(parameter.shape[0] for parameter in parameters)
    inside = first.untyped_storage().nbytes() // first.element_size() - first.storage_offset()
    if inside < rows * (first.numel() // first.shape[0]):
        return torch.cat([parameter.data for parameter in parameters])
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def _activation(module: nn.Module) -> str | None:
    """Name of an MLP's activation if the kernels know it, by what it does."""
    act = getattr(module, "act_fn", None)
    if act is None:
        return None
    probe = torch.linspace(-4, 4, 33)
    with torch.no_grad():
        shown = act(probe)
    for name, expected in (
        ("silu", nn.functional.silu(probe)),
        ("gelu_tanh", nn.functional.gelu(probe, approximate="tanh")),
    ):
        if torch.allclose(shown, expected, atol=1e-6):
            return name
    return None


class FusedMLP(nn.Module):
    """down(act(gate(x)) · up(x)); the last product adds the residual where there is one (`adds`)."""

    def __init__(self, mlp: nn.Module, activation: str, adds: bool):
        super().__init__()
        gate_up, bias = _merged([mlp.gate_proj, mlp.up_proj])
        self.gate_up = Linear(gate_up, bias, activation)
        self.down = Linear(*_merged([mlp.down_proj]), residual=adds)

    def forward(self, x_RD: Tensor, residual_RD: Tensor | None) -> Tensor:
        return self.down(self.gate_up(x_RD), residual_RD)

    def with_norm(self, x_RD: Tensor, residual_RD: Tensor, norm: NormWeights) -> tuple[Tensor, Tensor]:
        """(result, its norm)."""
        return self.down.with_norm(self.gate_up(x_RD), residual_RD, norm)


class FusedLayer(nn.Module):
    """A pre-norm decoder layer: attention on the engine's buffers, an MLP, two or four RMSNorms."""

    def __init__(self, layer: nn.Module, index: int, slot: _Slot, window: int | None):
        super().__init__()
        self.index, self.slot = index, slot
        attention = getattr(layer, "self_attn", None)
        names = ("q_proj", "k_proj", "v_proj", "o_proj", "head_dim", "scaling")
        missing = [name for name in names if not hasattr(attention, name)]
        if attention is None or missing:
            raise Unfusable(f"attention of {type(layer).__name__} lacks {missing}")
        self.qkv = Linear(*_merged([attention.q_proj, attention.k_proj, attention.v_proj]))
        four = hasattr(layer, "pre_feedforward_layernorm")
        self.out = Linear(*_merged([attention.o_proj]), residual=not four)
        d = attention.head_dim
        heads, kv_heads = attention.q_proj.out_features // d, attention.k_proj.out_features // d
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        self.rope = RopeStore(heads, kv_heads, d, *(None if norm is None else norm_weights(norm) for norm in norms))
        self.shape = AttendShape(
            float(attention.scaling), window, getattr(attention, "attn_logit_softcapping", None),
            getattr(attention, "sinks", None),
        )  # fmt: skip
        #: row bucket → bytes of the output projection that attention asks for, as the memory idles meanwhile
        self.hidden_bytes: dict[int, int] = {}
        self.input_norm = norm_weights(layer.input_layernorm)
        #: of the layer after this one, or the final one
        self.next_norm: NormWeights | None = None
        self.mlp_norm = norm_weights(layer.pre_feedforward_layernorm if four else layer.post_attention_layernorm)
        self.after_attention = norm_weights(layer.post_attention_layernorm) if four else None
        self.after_mlp = norm_weights(layer.post_feedforward_layernorm) if four else None
        mlp = layer.mlp
        gated = all(type(getattr(mlp, name, None)) is nn.Linear for name in ("gate_proj", "up_proj", "down_proj"))
        activation = _activation(mlp) if gated else None
        self.mlp = FusedMLP(mlp, activation, not four) if activation is not None else mlp

    def linears(self) -> list[Linear]:
        own = [self.qkv, self.out]
        return [*own, self.mlp.gate_up, self.mlp.down] if isinstance(self.mlp, FusedMLP) else own

    def forward(
        self, hidden_states: Tensor, *args: Any, position_embeddings: tuple[Tensor, Tensor], **kwargs: Any
    ) -> Tensor:
        run = self.slot.current
        if run is None:
            raise RuntimeError("a fused layer runs only inside FusedModel.forward")
        batch, count, width = hidden_states.shape
        x_RD = hidden_states.reshape(-1, width)
        if self.slot.half_tables is None:
            first, second = position_embeddings[1].chunk(2, -1)
            self.slot.half_tables = not torch.equal(first, second)
        cos_RW, sin_RW = (self._table(table, batch, count) for table in position_embeddings)
        keys, values = run.buffers.keys[self.index], run.buffers.values[self.index]
        qkv_RC = self.qkv(run.norm(hidden_states, self.input_norm))
        q_Rhd = rope_store(qkv_RC, cos_RW, sin_RW, self.rope, keys, values, run.visibility.write_BM)
        context_RC = self.attend(q_Rhd, keys, values, run.visibility)
        if self.after_attention is None:
            x_RD, normed_RD = self.out.with_norm(context_RC, x_RD, self.mlp_norm)
        else:
            x_RD = x_RD + rms_norm(self.out(context_RC), self.after_attention)
            normed_RD = rms_norm(x_RD, self.mlp_norm)
        if isinstance(self.mlp, FusedMLP) and self.after_mlp is None and self.next_norm is not None:
            x_RD, next_RD = self.mlp.with_norm(normed_RD, x_RD, self.next_norm)
            run.made = (self.next_norm, next_RD)
        else:
            x_RD, run.made = self._add(x_RD, normed_RD, batch), None
        run.stream_BMD = x_RD.view(batch, count, width)
        return run.stream_BMD

    def attend(self, q_Rhd: Tensor, keys: Tensor, values: Tensor, visibility: Visibility) -> Tensor:
        rows = q_Rhd.shape[0]
        hidden = self.hidden_bytes.get(row_bucket(rows), 0) if rows <= MAX_ROWS else 0
        return attend(q_Rhd, keys, values, visibility, self.shape, Ahead(self.out.weight_NK, hidden)).flatten(1)

    def _table(self, table: Tensor, batch: int, count: int) -> Tensor:
        table_RW = table.expand(batch, count, -1).reshape(batch * count, -1)
        return torch.cat((table_RW, table_RW), -1) if self.slot.half_tables else table_RW

    def _add(self, x_RD: Tensor, normed_RD: Tensor, batch: int) -> Tensor:
        if self.after_mlp is None:
            return self._mlp(normed_RD, x_RD, batch)
        return x_RD + rms_norm(self._mlp(normed_RD, None, batch), self.after_mlp)

    def _mlp(self, x_RD: Tensor, residual_RD: Tensor | None, batch: int) -> Tensor:
        if isinstance(self.mlp, FusedMLP):
            return self.mlp(x_RD, residual_RD)
        # mixtures of experts return their router's scores as well
        result = self.mlp(x_RD.view(batch, -1, x_RD.shape[-1]))
        y_RD = (result[0] if isinstance(result, tuple) else result).reshape(x_RD.shape)
        return y_RD if residual_RD is None else residual_RD + y_RD


class FusedNorm(nn.Module):
    """The final norm; keeps its last output, which features are made of."""

    def __init__(self, norm: nn.Module, slot: _Slot):
        super().__init__()
        self.norm, self.slot, self.last = norm_weights(norm), slot, None

    def forward(self, x: Tensor) -> Tensor:
        run = self.slot.current
        self.last = (rms_norm(x, self.norm) if run is None else run.norm(x, self.norm)).view_as(x)
        return self.last


class FusedHead(nn.Module):
    """The output matrix."""

    def __init__(self, head: nn.Module):
        super().__init__()
        self.linear = Linear(*_merged([head]))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


class FusedEmbedding(nn.Module):
    """A table of token embeddings: the library's gather takes longer for a few rows than a layer's product does."""

    def __init__(self, embedding: nn.Embedding):
        super().__init__()
        self.weight = embedding.weight

    def forward(self, tokens_BM: Tensor) -> Tensor:
        if not wants_kernel(self.weight):
            return nn.functional.embedding(tokens_BM, self.weight)
        rows_1RD = take_rows_kernel(self.weight.detach()[None], tokens_BM.reshape(1, -1))
        return rows_1RD.view(*tokens_BM.shape, -1)


def shallow_copy(module: nn.Module) -> nn.Module:
    """New module objects down the tree over the same parameters and buffers, without hooks."""
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
        choices: how products run fastest on this card, read and added to by `choose_ways`; None: it always measures.
    Raises: Unfusable when a layer's structure is not covered or the outputs differ.
    """

    def __init__(self, model: nn.Module, windows: dict[str, int | None], choices: Choices | None = None):
        places = {str(parameter.device) for parameter in model.parameters()}
        if len(places) > 1:
            raise Unfusable(f"its layers are on several devices: {', '.join(sorted(places))}")
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            raise Unfusable("its parameters are sharded")
        self.windows, self.choices, self._slot = windows, choices, _Slot()
        config = model.config.get_text_config()
        kinds = getattr(config, "layer_types", None) or [next(iter(windows))] * config.num_hidden_layers
        self.view = shallow_copy(model)
        decoder = text_decoder(self.view)
        layers = decoder_layers(self.view)
        self.layers = [FusedLayer(layer, n, self._slot, windows[kinds[n]]) for n, layer in enumerate(layers)]
        for n, layer in enumerate(self.layers):
            layers[n] = layer
        self.norm = decoder.norm = FusedNorm(decoder.norm, self._slot)
        for layer, norm in zip(
            self.layers, [*(later.input_norm for later in self.layers[1:]), self.norm.norm], strict=True
        ):
            layer.next_norm = norm
        self.head = FusedHead(self.view.get_output_embeddings())
        self.view.set_output_embeddings(self.head)
        embedding = self.view.get_input_embeddings()
        # others scale what they look up, or renormalise their rows
        if type(embedding) is nn.Embedding and embedding.max_norm is None:
            self.view.set_input_embeddings(FusedEmbedding(embedding))
        self.device, self.dtype = model.device, model.dtype
        # any 4-D mask is passed through unread by the fused layers and spares building one
        none = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=self.device)
        self._mask = {kind: none for kind in windows} if len(windows) > 1 else none
        self._check(model)

    def linears(self) -> list[Linear]:
        return [self.head.linear, *(linear for layer in self.layers for linear in layer.linears())]

    def compile_ways(self, rows: int) -> None:
        """Compile what `choose_ways` of so many rows would measure."""
        kept = compile_ways(self.linears(), rows, self.choices, self._about)
        if kept is not None:
            self._hide(rows, kept.hidden_bytes)

    @property
    def _about(self) -> str:
        """What choices depend on besides the products: the heads that stand between them."""
        rope = self.layers[0].rope
        return f"{rope.heads} heads, {rope.kv_heads} of keys, of {rope.head_dim}"

    def choose_ways(self, rows: int) -> dict[str, float]:
        """Choose how products of `rows` rows run, as `choices` say or by measurement (CUDA only).

        Returns: "N×K[ activation] rows" → microseconds of the chosen way, measured by itself.
        """
        chosen = decide_ways(self.linears(), rows, self.choices, self._about, self._settle)
        if chosen is None:
            return {}
        self._hide(rows, chosen.hidden_bytes)
        return {f"{name} {rows}": microseconds for name, microseconds in chosen.microseconds.items()}

    def _hide(self, rows: int, hidden: int) -> None:
        """Have attention ask for so many bytes of the output projection."""
        for layer in self.layers:
            layer.hidden_bytes[row_bucket(rows)] = hidden

    def _settle(self, found: list[Measured], rows: int, context: int = 512) -> int:
        """Choose among the ways that are about as fast by themselves, and how much of its output projection attention
        asks for. Both are timed in layers that run one behind the other: there a kernel is launched, and fetches, while
        others still run.

        Returns: bytes that attention asks for.
        """
        layers = self._stacked()
        run = self._stack(layers, rows, context)

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

        for measured in found:
            if len(measured.close) > 1 and any(linear in measured.linears for linear in layers[0].linears()):
                choose_fastest(measured.close, partial(measured.choose, rows))
        choose_fastest(HIDDEN_BYTES, partial(self._hide, rows))
        return self.layers[0].hidden_bytes[row_bucket(rows)]

    def _stacked(self) -> list[FusedLayer]:
        """As many layers as push each other's weights out of the cache: they come from memory in a whole model."""
        weights = sum(linear.weight_NK.nbytes for linear in self.layers[0].linears())
        cache = torch.cuda.get_device_properties(self.device).L2_cache_size if self.device.type == "cuda" else 0
        return self.layers[: max(STACKED, -(-2 * cache // weights))]

    def _stack(self, layers: list[FusedLayer], rows: int, context: int) -> Callable[[], Tensor]:
        """A forward of `rows` tokens through the first layers, behind a context of so many slots."""
        buffers = self.buffers(1, context + rows)
        position_BM = context + torch.arange(rows, device=self.device)[None]
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
            self._slot.current = Pass(visibility, buffers)
            try:
                x_BMD: Tensor = first_BMD
                for layer in layers:
                    x_BMD = layer(x_BMD, *others, **bound.kwargs)
            finally:
                self._slot.current = None
            return x_BMD

        return run

    def buffers(self, batch: int, capacity: int) -> Buffers:
        """Buffers for `batch` rows of `capacity` slots."""
        shapes = [(layer.rope.kv_heads, layer.rope.head_dim) for layer in self.layers]
        return Buffers(shapes, batch, capacity, self.dtype, self.device)

    @torch.inference_mode()
    def forward(
        self,
        tokens_BM: Tensor,
        visibility: Visibility,
        buffers: Buffers,
        layer_ids: tuple[int, ...] = (),
        last_only: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """One pass: writes keys and values, returns (logits [B, M or 1, V], hidden [B, M, D] post-norm,
        streams [B, M, k, D] or None)."""
        self._slot.current = Pass(visibility, buffers)
        try:
            with record_layer_inputs(self.view, layer_ids) as captured:
                output = self.view(
                    input_ids=tokens_BM,
                    position_ids=visibility.position_BM.clamp(min=0),
                    attention_mask=self._mask,
                    use_cache=False,
                    logits_to_keep=1 if last_only else 0,
                )
        finally:
            self._slot.current = None
        streams = torch.stack([captured[k] for k in layer_ids], 2) if layer_ids else None
        return output.logits, self.norm.last, streams

    @torch.no_grad()
    def _check(self, model: nn.Module, length: int = 12) -> None:
        """Raises Unfusable unless hidden states and logits equal the original model's on random tokens."""
        noise = torch.Generator().manual_seed(0)
        vocabulary = model.get_input_embeddings().weight.shape[0]
        tokens_BT = torch.randint(0, vocabulary, (2, length), generator=noise).to(self.device)
        position_BT = torch.arange(length, device=self.device).expand(2, length)
        given = tokens_BT, Visibility(position_BT, position_BT, position_BT[:, 0]), self.buffers(2, length)
        with compiling():
            compile_ahead(lambda: self.forward(*given))
            before = model(input_ids=tokens_BT, use_cache=False, output_hidden_states=True)
        logits, hidden, _ = self.forward(*given)
        pairs = {"hidden states": (hidden, before.hidden_states[-1]), "logits": (logits, before.logits)}
        for name, (mine, theirs) in pairs.items():
            distance = float((mine.float() - theirs.float()).norm() / theirs.float().norm())
            if not distance <= TOLERANCE[self.dtype]:
                raise Unfusable(
                    f"fused {name} of {type(model).__name__} differ from the model's by {distance:.2e} (relative), "
                    f"expected at most {TOLERANCE[self.dtype]:.0e}"
                )
