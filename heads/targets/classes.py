"""Which transformers class a target is loaded with, and what is loaded beside its text part.

Some models read images or audio as well; heads are trained on their text part. Where transformers maps the whole
model's config to a text class (Llama 4, Qwen3.5), that class takes the text part alone from the whole model's files.
Elsewhere the whole model is loaded with its own class, although its image part is never run: transformers has no class
that reads only the text from those files, and a tuned target must be saved with its image part to be served.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from headstart.heads.errors import TargetError
from headstart.heads.targets.locate import text_decoder

#: transformers' auto classes of models with token ids in and logits out; the first that has the model is taken
AUTO_CLASSES = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForMultimodalLM")
EXPECTED = "expected a causal language model (Llama, Qwen, …) or an image model around one (Gemma 3, Qwen-VL, …)"

TRUST = "read that code, then give target.trust_remote_code=true on the command line, or name another target"


def auto_class(settings: Any, name: str, trusted: bool = False) -> Any:
    """The auto class that loads a model of this config.

    Args:
        settings: the config of the whole model.
        name: of the target, for the message.
        trusted: whether code that comes with the model may run.
    Raises: TargetError for a model that does not continue text: an encoder, an encoder with a decoder, a part of one;
        and for one whose config.json names code on the Hub for its attention.
    """
    import transformers

    _refuse_kernels(settings, name)
    saved_as = next(iter(getattr(settings, "architectures", None) or []), None)
    found = f"target {name!r} is of type {settings.model_type}" + (f" ({saved_as})" if saved_as else "")
    if getattr(settings, "is_encoder_decoder", False):
        raise TargetError(f"{found}, whose decoder reads an encoder's output: {EXPECTED}")
    own_code = getattr(settings, "auto_map", None) or {}
    for kind in AUTO_CLASSES:
        loads = getattr(transformers, kind, None)
        if loads is not None and ((trusted and kind in own_code) or type(settings) in loads._model_mapping):
            return loads
    if not trusted and any(kind in own_code for kind in AUTO_CLASSES):
        raise TargetError(f"{found}, which only code that comes with it can load: {TRUST}")
    raise TargetError(f"{found}, which transformers has no causal language model for: {EXPECTED}")


def _refuse_kernels(settings: Any, name: str) -> None:
    """Raises: TargetError where a config.json names a kernel on the Hub, which transformers would fetch and run.

    There it goes before target.attn_implementation, which only the user of this machine sets.
    """
    found = getattr(settings, "_attn_implementation", None)
    if isinstance(found, str) and "/" in found:
        raise TargetError(
            f"target {name!r}: its config.json sets _attn_implementation to {found!r}, which is code on the Hub: "
            "remove it from config.json; if you trust that code, give target.attn_implementation on the command line"
        )


def beside_text(model: Any) -> dict[str, int]:
    """Bytes of the weights that a forward over text does not read, by the name of their part (`vision_tower`, …)."""
    output = model.get_output_embeddings()
    read = {id(x) for part in (text_decoder(model), output) if part is not None for x in part.parameters()}
    sizes: dict[str, int] = {}
    for name, weight in model.named_parameters():
        if id(weight) not in read:
            part = _part(name)
            sizes[part] = sizes.get(part, 0) + weight.numel() * weight.element_size()
    return sizes


def parts_note(model: Any, unread: Iterable[str] = ()) -> list[str]:
    """What a user should know of the parts that text does not need: those that were loaded, and those that were not.

    Args: unread: names of tensors in the model's files that its class does not have.
    """
    notes = []
    if sizes := beside_text(model):
        total = sum(sizes.values())
        share = total / max(sum(weight.numel() * weight.element_size() for weight in model.parameters()), 1)
        notes.append(
            f"heads are trained on the text part of {type(model).__name__}; {', '.join(sorted(sizes))} "
            f"{'is' if len(sizes) == 1 else 'are'} loaded with it and not used: {total / 2**30:.2g} GiB, {share:.0%}"
        )
    if parts := sorted({_part(name) for name in unread}):
        notes.append(f"tensors in the target's files that {type(model).__name__} does not use: {', '.join(parts[:8])}")
    return notes


def _part(name: str) -> str:
    """The first piece of a tensor's name that says something: `visual` of `model.visual.blocks.0.norm1.weight`."""
    pieces = name.split(".")
    return pieces[1] if pieces[0] == "model" and len(pieces) > 1 else pieces[0]
