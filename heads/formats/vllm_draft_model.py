"""vLLM 0.32: its rules for ordinary language models that draft, which Headstart does not read."""

from __future__ import annotations

import torch

from headstart.heads.checkpoints.geometry import integer
from headstart.heads.checkpoints.tensor_map import some
from headstart.heads.formats.eagle_rules import llama_sizes
from headstart.heads.formats.handling import Case

#: architectures of which a model is built to compare names: num_hidden_layers bounds the number of their modules
DENSE = ("llama", "mistral", "qwen2", "qwen3")


def check_draft_model(case: Case) -> None:
    """An ordinary causal language model that drafts: only its vocabulary has to be the target's."""
    _compare_layers(case)
    config = case.config.get("text_config")
    config = config if isinstance(config, dict) else case.config
    vocab = integer(config, "vocab_size", "config.json")
    longest = config.get("max_position_embeddings")
    if case.target is not None and type(longest) is int and longest < (limit := case.target.max_position_embeddings):
        case.note(f"it drafts for texts of up to {longest} tokens, the target's are up to {limit}")
    if case.target is None:
        case.note(f"as a draft model, for targets whose vocab_size is {vocab}")
    elif vocab != case.target.vocab_size:
        case.refuse(f"vocab_size is {vocab}, the target's {case.target.vocab_size}: a draft model needs the same")
    else:
        case.note('as a draft model: "method": "draft_model"; compare the tokenizers, which no engine does')


def _compare_layers(case: Case) -> None:
    """Compare the tensors with those of the architecture in config.json, if it is one of DENSE."""
    from transformers import AutoConfig, AutoModelForCausalLM  # takes seconds, and only this check needs it

    config, where = dict(case.raw.config), "config.json"
    kind = config.get("model_type")
    if kind not in DENSE or config.get("quantization_config") is not None:
        case.note(f"its layers are not compared with config.json (model_type {kind!r})")
        return
    llama_sizes(config)  # refuses sizes out of bounds before a module is built
    integer(config, "max_position_embeddings", where, default=2048)
    try:
        made = AutoConfig.for_model(**{**config, "dtype": None})
        with torch.device("meta"):
            shapes = {name: tuple(x.shape) for name, x in AutoModelForCausalLM.from_config(made).state_dict().items()}
    except Exception as error:  # noqa: BLE001 - a damaged config fails in engines as it fails here
        case.refuse(f"no {kind} can be built from config.json ({type(error).__name__}: {error})")
        return
    held = {name: info.shape for name, info in case.raw.tensors.items()}
    if made.tie_word_embeddings or "lm_head.weight" not in held:
        shapes.pop("lm_head.weight", None)
        if not made.tie_word_embeddings:
            case.refuse("lm_head.weight is missing and tie_word_embeddings is false")
    if missing := sorted(set(shapes) - set(held)):
        case.refuse(f"tensors {some(missing)} are missing")
    for name in sorted(set(shapes) & set(held)):
        if shapes[name] != held[name]:
            case.refuse(f"{name} is {list(held[name])}, config.json makes it {list(shapes[name])}")
        elif not case.raw.tensors[name].dtype.is_floating_point:
            case.misread(f"{name} is {case.raw.tensors[name].dtype}: it would be cast in silence")
    if odd := sorted(set(held) - set(shapes) - {"lm_head.weight"}):
        case.note(f"{some(odd)} belong to no layer of a {kind}")
