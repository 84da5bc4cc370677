"""Measures how a target computes its logits when it is loaded, instead of guessing it from names of config fields.

The teacher must give the model's own logits. Otherwise every soft loss learns another distribution, and the argmax
would not show it. A short forward of two rows tells. In one row the products of the output matrix are replaced by known
numbers, and the logits that the model makes of them show its rule: a factor, a soft-cap, or one that heads cannot copy.
The other row is left alone. Its logits are compared with the teacher's, its hidden states with those that hooks see.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from headstart.heads.ends import Teacher
from headstart.heads.errors import TargetError
from headstart.heads.numerics import row_errors, wide
from headstart.heads.targets.explained import explained_forward
from headstart.heads.targets.locate import counted_calls, decoder_layers, record_layer_inputs, text_decoder

#: tokens of the probe
LENGTH = 8
#: largest relative error of a row that can be rounding
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
#: a measured number is taken for a number of the config if their relative difference is below this
SNAP = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 3e-3, torch.bfloat16: 5e-3}
#: below this a product shows the factor alone: a soft-cap, which is far larger, does not change it
SMALL = 3e-3


@dataclass(frozen=True)
class OutputRule:
    """What a model makes of the product z of its output matrix: `softcap · tanh(scale · z / softcap)`.

    Attributes:
        softcap: None for a model without one, whose logits are `scale · z`.
    """

    scale: float = 1.0
    softcap: float | None = None

    def apply(self, z: Tensor) -> Tensor:
        z = z * self.scale
        return z if self.softcap is None else torch.tanh(z / self.softcap) * self.softcap


@dataclass
class Seen:
    """What hooks saw of one forward; None for what was not called as a module.

    Attributes:
        hidden_BTD: output of the decoder, post-norm.
        read_BTD: input of the output matrix.
        product_BTV: output of the output matrix, in the last row the known numbers that replaced it.
    """

    hidden_BTD: Tensor | None = None
    read_BTD: Tensor | None = None
    product_BTV: Tensor | None = None


def ramp_like(product_TV: Tensor) -> Tensor:
    """Known numbers for the product of one row: both signs, sizes from 1e-3 to 1e4 (1e3 in float16)."""
    count, top = product_TV.numel(), 3 if product_TV.dtype == torch.float16 else 4
    size_N = torch.logspace(-3, top, count, dtype=torch.float64, device="cpu")
    size_N[1::2] *= -1
    return size_N.to(product_TV.device, product_TV.dtype).view_as(product_TV)


def known_number(value: float, config: Any, tolerance: float) -> float:
    """A measured value without its rounding: 1, a number of the config or the inverse of one, if it is near to it."""
    texts = [config.get_text_config(), config]
    numbers = [n for c in texts for n in vars(c).values() if isinstance(n, int | float) and not isinstance(n, bool)]
    candidates = [1.0, *(float(n) for n in numbers if n), *(1 / n for n in numbers if n)]
    near = [n for n in candidates if math.isfinite(n) and abs(n - value) <= tolerance * abs(value)]
    return min(near, key=lambda n: (n != 1.0, abs(n - value))) if near else value


def fit_factor(x: Tensor, y: Tensor, tolerance: float) -> float | None:
    """The factor a of y = a · x by least squares; None if the relative error is above `tolerance`."""
    x, y = x.double(), y.double()
    total = float((x * x).sum())
    factor = float((x * y).sum()) / total if total else math.nan
    error = float((y - factor * x).norm()) / max(float(y.norm()), 1e-30)
    return factor if error <= tolerance else None


def fit_rule(z: Tensor, y: Tensor, config: Any, dtype: torch.dtype) -> OutputRule | None:
    """The rule that made the logits y [N] of the products z [N]; None if no OutputRule does."""
    tolerance, snap = TOLERANCE[dtype], SNAP[dtype]
    z, y = z.double().flatten(), y.double().flatten()
    if not bool(torch.isfinite(y).all()):
        return None
    small = z.abs() <= SMALL
    scale = fit_factor(z[small], y[small], tolerance)
    if scale is None or scale == 0:
        return None
    for softcap in (math.inf, _softcap(z, y, scale)):  # an infinite one is none
        known = known_number(softcap, config, snap) if math.isfinite(softcap) else None
        rule = OutputRule(known_number(scale, config, snap), known)
        if bool(((rule.apply(z) - y).abs() <= tolerance * y.abs() + 1e-9).all()):
            return rule
    return None


def _softcap(z: Tensor, y: Tensor, scale: float) -> float:
    """c of y = c · tanh(u), u = scale · z / c, from the largest z: tanh(u) / u = y / (scale · z) falls as u grows."""
    place = int(z.abs().argmax())
    uncapped, capped = abs(scale * float(z[place])), abs(float(y[place]))
    if not 0 < capped < uncapped:
        return math.nan
    low, high = 1e-6, 1e9
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if math.tanh(middle) / middle > capped / uncapped else (low, middle)
    return uncapped / low


@contextmanager
def watched(model: Any, decoder: nn.Module) -> Iterator[Seen]:
    """While open, forwards of `model` are seen, and the product of the last row is replaced by `ramp_like`.

    Args: decoder: the module that returns `last_hidden_state`.
    """
    seen = Seen()

    def after_decoder(_module: nn.Module, _args: tuple, output: Any) -> None:
        seen.hidden_BTD = output[0] if isinstance(output, tuple) else output.last_hidden_state

    def after_matrix(_module: nn.Module, args: tuple, kwargs: dict, output: Tensor) -> Tensor:
        seen.read_BTD = args[0] if args else next(iter(kwargs.values()))
        seen.product_BTV = output.clone()
        seen.product_BTV[-1] = ramp_like(output[-1])
        return seen.product_BTV.clone()

    matrix = model.get_output_embeddings()
    with (
        decoder.register_forward_hook(after_decoder),
        matrix.register_forward_hook(after_matrix, with_kwargs=True),
    ):
        yield seen


@contextmanager
def without_traces(model: nn.Module) -> Iterator[None]:
    """Remove the hooks that a forward leaves on a model's modules.

    transformers installs them for good when it is first asked for hidden states. torch.compile would break a layer's
    graph at each of them.
    """
    flag = "_output_capturing_hooks_installed"
    before = [(m, set(m._forward_hooks), set(m._forward_pre_hooks), flag in vars(m)) for m in model.modules()]
    try:
        yield
    finally:
        for module, after, ahead, flagged in before:
            for hooks, kept in ((module._forward_hooks, after), (module._forward_pre_hooks, ahead)):
                for key in set(hooks) - kept:
                    del hooks[key]
            if not flagged:
                vars(module).pop(flag, None)


def probe_tokens(vocab_size: int, device: torch.device, config: Any = None) -> Tensor:
    """Tokens drawn from the whole vocabulary, int64 [2, T]: the same in both rows and at every call.

    Args: config: of the whole model. Ids that stand for parts of images in it are left out: no text holds them, and
        Gemma 4 embeds another token in their place.
    """
    tokens_T = torch.randint(vocab_size, (LENGTH,), generator=torch.Generator().manual_seed(0), device="cpu")
    if config is not None and config.get_text_config() is not config:
        named = (value for key, value in vars(config).items() if key.endswith(("_token_id", "_token_index")))
        taken = {value for value in named if isinstance(value, int)}
        free = next((token for token in range(vocab_size) if token not in taken), 0)
        tokens_T = torch.tensor([free if token in taken else token for token in tokens_T.tolist()])
    return tokens_T.expand(2, LENGTH).to(device)


@torch.no_grad()
def measured_teacher(model: Any, teacher: Teacher, name: str, states: bool = True) -> Teacher:
    """`teacher`, which has the matrix and the bias alone, with the factor and the soft-cap of the model's logits.

    It takes two forwards of eight tokens; of a sharded target, every rank makes them.

    Args:
        states: compare hidden states as well. A sharded model does not return any: its layers are of other classes.
    Raises: TargetError when the model cannot run, its logits follow another rule, or its hidden states are not those
        that hooks capture; it says what was found.
    """
    layers = model.config.get_text_config().num_hidden_layers
    place = model.get_input_embeddings().weight.device
    tokens_BT = probe_tokens(teacher.weight_VD.shape[0], place, model.config)
    decoder = text_decoder(model)
    inner = tuple(range(1, layers))
    with (
        explained_forward(name),
        without_traces(model),
        watched(model, decoder) as seen,
        record_layer_inputs(model, inner) as streams,
        counted_calls(decoder_layers(model)) as calls,
    ):
        answer = model(input_ids=tokens_BT, use_cache=False, output_hidden_states=states)
    with explained_forward(name):
        alone = decoder(input_ids=tokens_BT, use_cache=False)
    _require_once(calls, name)
    if seen.hidden_BTD is None:
        raise TargetError(f"{name}: its text decoder ({type(decoder).__name__}) took no part in a forward")
    tolerance = TOLERANCE.get(seen.hidden_BTD.dtype, 1e-3)
    captured = seen.hidden_BTD[0]
    _require_finite(f"{name}: its last hidden states", captured)
    _require_finite(f"{name}: its logits", answer.logits[0])
    # the median row: between two forwards, rounding sends a token of a mixture of experts to other experts now and
    # then; a fault shifts every row
    last_TD, what = alone.last_hidden_state[0], f"{name}: the last hidden state of its decoder alone"
    _require_near(what, last_TD, captured, tolerance, median=True)
    if states:
        _check_streams(name, {**streams, layers: seen.hidden_BTD}, answer.hidden_states, tolerance)
    measured = _with_rule(teacher, seen, answer.logits, model.config, name)
    place = measured.weight_VD.device
    logits_TV = answer.logits[0, :, : teacher.weight_VD.shape[0]].to(place)
    tolerance = max(tolerance, TOLERANCE.get(logits_TV.dtype, 0.0))
    _require_near(f"{name}: the logits of its output matrix", measured.logits(captured.to(place)), logits_TV, tolerance)
    return measured


def _require_finite(what: str, values: Tensor) -> None:
    """Raises: TargetError for NaN and +inf. -inf is allowed: some models forbid a token by it."""
    if not bool((values < torch.inf).all()):
        dtype = str(values.dtype).removeprefix("torch.")
        wider = "set target.dtype=bfloat16 or float32, which hold larger values, or " if dtype == "float16" else ""
        raise TargetError(f"{what} hold NaN or infinite values in {dtype}: {wider}copy its weights again")


def _require_once(calls: list[int], name: str) -> None:
    if odd := [(number, count) for number, count in enumerate(calls) if count != 1]:
        number, count = odd[0]
        raise TargetError(
            f"{name}: its decoder layer {number} runs {count} times in a forward, expected once: heads read the input "
            "of every layer, and such a target has several or none"
        )


def _check_streams(name: str, captured: dict[int, Tensor], states: Any, tolerance: float) -> None:
    """The inputs of layers and the last hidden state against the model's own hidden_states."""
    count = max(captured) + 1
    if states is None or len(states) != count:
        raise TargetError(
            f"{name}: gives {'no' if states is None else len(states)} hidden states, expected {count}: heads read the "
            "input of every layer and the last hidden state, which decoding could not give them"
        )
    for k, stream_BTD in captured.items():
        _require_near(f"{name}: the captured hidden_states[{k}]", stream_BTD[0], states[k][0], tolerance)


def _with_rule(teacher: Teacher, seen: Seen, logits_BTV: Tensor, config: Any, name: str) -> Teacher:
    if seen.product_BTV is None or seen.read_BTD is None or seen.hidden_BTD is None:
        raise TargetError(
            f"{name}: its output matrix is not called as a module, so what the model makes of its product cannot be "
            "measured: heads cannot be trained for it"
        )
    width = min(seen.product_BTV.shape[-1], logits_BTV.shape[-1])
    product_TV = seen.product_BTV[-1, :, :width]
    # the coarser dtype: some models multiply in float32 and round the logits
    dtype = max(product_TV.dtype, logits_BTV.dtype, key=lambda kind: TOLERANCE.get(kind, 0.0))
    rule = fit_rule(product_TV, logits_BTV[-1, :, :width].to(product_TV.device), config, dtype)
    if rule is None:
        raise TargetError(
            f"{name}: what the model makes of its output matrix's product is neither a factor nor a soft-cap, which is "
            "all that a teacher can copy: heads cannot be trained for it"
        )
    before = _input_factor(teacher, seen.hidden_BTD[0], seen.read_BTD[0], config, name)
    return Teacher(teacher.weight_VD, teacher.bias_V, rule.softcap, rule.scale * before, teacher.norm_D)


def _input_factor(teacher: Teacher, hidden_TD: Tensor, read_TD: Tensor, config: Any, name: str) -> float:
    """The factor between the last hidden state and the input of the output matrix (MiniCPM).

    Without a bias it is the same as a factor on the product.
    """
    tolerance = TOLERANCE[hidden_TD.dtype]
    same = read_TD.shape == hidden_TD.shape
    factor = fit_factor(hidden_TD, read_TD.to(hidden_TD.device), tolerance) if same else None
    if factor is not None:
        factor = known_number(factor, config, SNAP[hidden_TD.dtype])
    if factor is None or (factor != 1.0 and teacher.bias_V is not None):
        raise TargetError(
            f"{name}: its output matrix does not read the last hidden state"
            f"{'' if factor is None else f' but {factor:.4g} times it, and adds a bias'}: a teacher cannot copy that"
        )
    return factor


def _require_near(what: str, found: Tensor, expected: Tensor, tolerance: float, median: bool = False) -> None:
    """Raises: TargetError unless every row of `found` (its median row) is `expected` but for rounding."""
    if found.shape != expected.shape:
        raise TargetError(f"{what} have shape {list(found.shape)}, the model's are {list(expected.shape)}")
    found, expected = wide(found), wide(expected).to(found.device)
    error_T = row_errors(found, expected)
    worst = float(error_T.median() if median else error_T.max())
    if not worst <= tolerance:
        factor = float((found * expected).sum() / (found * found).sum().clamp(min=1e-30))
        raise TargetError(
            f"{what} differ from the model's own by {worst:.2g} (relative; rounding explains {tolerance:g}; the best "
            f"factor between them is {factor:.4g}): heads would be trained for another model"
        )


class _Given(BaseModelOutputWithPast):
    """The output of a decoder that did not run. Every field but `last_hidden_state` is None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


@torch.no_grad()
def rule_without_weights(model: Any) -> OutputRule | None:
    """The rule of a model on the meta device. Random hidden states replace its decoder's, known numbers its products.

    Returns: None if the model's own code needs more than that; the rule is then measured when it is loaded.
    Raises: TargetError for a rule that a teacher cannot copy.
    """
    text, matrix = model.config.get_text_config(), model.get_output_embeddings()
    noise = torch.Generator().manual_seed(0)
    hidden_BTD = torch.randn(1, LENGTH, text.hidden_size, generator=noise, device="cpu")
    given, rows, decoder = _Given(last_hidden_state=hidden_BTD), matrix.weight.shape[0], text_decoder(model)
    # the model calls one of the two
    without = [module for module in {decoder, model.base_model} if module is not model]
    for module in without:
        module.forward = lambda *args, **kwargs: given
    matrix.forward = lambda x: x.new_zeros(*x.shape[:-1], rows)
    try:
        with torch.device("cpu"), watched(model, decoder) as seen:
            logits_BTV = model(input_ids=torch.zeros(1, LENGTH, dtype=torch.int64), use_cache=False).logits
    except Exception:  # whatever a model's own code raises without its weights
        return None
    finally:
        for module in (*without, matrix):
            vars(module).pop("forward", None)
    seen.hidden_BTD = hidden_BTD
    if seen.product_BTV is None:
        return None
    alone = Teacher(matrix.weight, getattr(matrix, "bias", None))
    measured = _with_rule(alone, seen, logits_BTV, model.config, type(model).__name__)
    return OutputRule(measured.scale, measured.softcap)


@torch.no_grad()
def require_single_pass(model: Any, name: str) -> None:
    """Refuse a model on the meta device that runs a layer several times. Its layers here only pass on their input.

    Nothing is refused if the model's own code needs more than that; `measured_teacher` asks again when it is loaded.
    Raises: TargetError, as measured_teacher would.
    """
    layers, decoder = decoder_layers(model), text_decoder(model)
    embedded = model.get_input_embeddings().weight
    for layer in layers:
        layer.forward = lambda *args, **kwargs: args[0] if args else kwargs["hidden_states"]
    try:
        with torch.device(embedded.device), without_traces(model), counted_calls(layers) as calls:
            mask = torch.zeros(1, 1, LENGTH, LENGTH, dtype=embedded.dtype)
            decoder(torch.zeros(1, LENGTH, dtype=torch.int64), attention_mask=mask, use_cache=False)
    except Exception:  # whatever a model's own code raises without its weights
        return
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)
    _require_once(calls, name)
