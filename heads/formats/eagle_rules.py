"""What the engines' rules about EAGLE heads share: sizes, tensors, and the draft vocabulary."""

from __future__ import annotations

from typing import Any

import torch

from headstart.heads import vocab
from headstart.heads.checkpoints.geometry import LLAMA_DEFAULTS, integer
from headstart.heads.formats.verdicts import WRONG, Case, TensorRule, Verdict


def llama_sizes(config: dict[str, Any]) -> dict[str, int]:
    """Symbol → size as an engine computes them from a llama config, transformers' defaults included.

    H draft width, D target width, A query rows, G key/value rows, I MLP width, V target and U draft vocabulary.
    Raises: FormatError for a value that is no size.
    """
    where = "config.json"
    full = {**LLAMA_DEFAULTS, **{key: value for key, value in config.items() if value is not None}}
    hidden, heads = integer(full, "hidden_size", where), integer(full, "num_attention_heads", where)
    kv_heads = integer(full, "num_key_value_heads", where, default=heads)
    head_dim = integer(full, "head_dim", where, default=max(hidden // heads, 1))
    width = integer(full, "target_hidden_size", where, default=hidden)
    vocab_size = integer(full, "vocab_size", where)
    return {
        "H": hidden,
        "2H": 2 * hidden,
        "D": width,
        "3D": 3 * width,
        "A": heads * head_dim,
        "G": kv_heads * head_dim,
        "I": integer(full, "intermediate_size", where),
        "V": vocab_size,
        "U": integer(full, "draft_vocab_size", where, default=vocab_size),
        "layers": integer(full, "num_hidden_layers", where),
    }


def layer_tensors(prefix: str, width: str, missing: Verdict) -> list[TensorRule]:
    """Tensors of one llama draft layer whose attention input is `width` wide."""
    return [
        TensorRule(f"{prefix}self_attn.q_proj.weight", ("A", width), missing),
        TensorRule(f"{prefix}self_attn.k_proj.weight", ("G", width), missing),
        TensorRule(f"{prefix}self_attn.v_proj.weight", ("G", width), missing),
        TensorRule(f"{prefix}self_attn.o_proj.weight", ("H", "A"), missing),
        TensorRule(f"{prefix}mlp.gate_proj.weight", ("I", "H"), missing),
        TensorRule(f"{prefix}mlp.up_proj.weight", ("I", "H"), missing),
        TensorRule(f"{prefix}mlp.down_proj.weight", ("H", "I"), missing),
        TensorRule(f"{prefix}post_attention_layernorm.weight", ("H",), missing, "the norm stays at ones"),
    ]


EAGLE3_NORMS = ("midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight", "norm.weight")


def eagle3_tensors(missing: Verdict) -> list[TensorRule]:
    """Tensors of an EAGLE-3 head that engines do not share from the target; lm_head and d2t have rules of their own."""
    norms = [TensorRule(name, ("H",), missing, "the norm stays at ones") for name in EAGLE3_NORMS]
    return [TensorRule("fc.weight", ("H", "3D"), missing), *layer_tensors("midlayer.", "2H", missing), *norms]


def eagle_tensors(missing: Verdict) -> list[TensorRule]:
    """Tensors of an EAGLE-1 head."""
    return [TensorRule("fc.weight", ("H", "2H"), missing), *layer_tensors("layers.0.", "H", missing)]


def eagle_config_of(config: dict[str, Any]) -> dict[str, Any]:
    """The nested `eagle_config`, empty where it is missing or no object."""
    nested = config.get("eagle_config")
    return nested if isinstance(nested, dict) else {}


def check_activation(case: Case, config: dict[str, Any]) -> None:
    """Refuse what vLLM and SGLang cannot compute."""
    if config.get("hidden_act", "silu") != "silu":
        case.refuse(f"hidden_act is {config['hidden_act']!r}; its MLP knows silu")


def check_lm_head(case: Case, sizes: dict[str, int], missing: Verdict, why: str) -> None:
    """Compare the head's output matrix with config.json. Args: missing, why: what the engine does without one."""
    shape, expected = case.shape("lm_head.weight"), (sizes["U"], sizes["H"])
    if shape is None:
        case.verdict.add(missing, why)
    elif shape != expected:
        case.refuse(f"lm_head.weight is {list(shape)}, config.json makes it {list(expected)}")


def check_draft_map(case: Case, sizes: dict[str, int], misshapen: Verdict = WRONG) -> None:
    """Find faults in d2t, or its absence where U < V. Args: misshapen: what the engine does with a wrong shape."""
    size, vocab_size = sizes["U"], sizes["V"]
    if "d2t" not in case.names and size < vocab_size:
        case.misread(
            f"d2t is missing with draft_vocab_size {size} < vocab_size {vocab_size}: draft ids pass as target ids"
        )
    elif problem := draft_map_problem(case, size, vocab_size):
        case.verdict.add(misshapen if "shape" in problem else WRONG, problem)


def check_own_embeddings(case: Case, sizes: dict[str, int]) -> None:
    """A head of another width than the target's cannot share the target's embeddings."""
    if sizes["H"] != sizes["D"] and "embed_tokens.weight" not in case.names:
        case.misread(
            f"embed_tokens.weight is missing and hidden_size {sizes['H']} is not the target's: it stays random"
        )


def draft_map_problem(case: Case, size: int, vocab_size: int) -> str | None:
    """What is wrong with the values of d2t and t2d, or None."""
    if "d2t" not in case.names:
        return None
    offsets = case.raw.read(case.names["d2t"])
    if offsets.dtype not in (torch.int64, torch.int32):
        return f"d2t is {offsets.dtype}, expected int64 offsets"
    if tuple(offsets.shape) != (size,):
        return f"d2t has shape {list(offsets.shape)}, expected [{size}]"
    ids = vocab.from_offsets(offsets)
    if not vocab.is_draft_vocab(ids, vocab_size):
        return (
            f"d2t + index is no ascending list of ids below {vocab_size}: it must hold offsets (target id - draft id)"
        )
    if "t2d" in case.names:
        mask = case.raw.read(case.names["t2d"])
        if tuple(mask.shape) != (vocab_size,) or not torch.equal(torch.nonzero(mask).squeeze(1), ids):
            return "t2d does not mark the ids that d2t lists"
    return None


def mask_token_problem(name: str, token: Any, vocab: int) -> str | None:
    """What is wrong with the token that stands for places still to be drafted, or None."""
    if type(token) is int and 0 <= token < vocab:
        return None
    return f"{name} is {token!r}, expected the token that stands for what is to be drafted: an id below {vocab}"
