"""SGLang 0.5.23 (read from its source): EAGLE-1 and EAGLE-3, no Medusa. Unknown tensors are skipped in silence.

EAGLE-3 takes the portable directory. EAGLE-1 needs its own: another architecture name, and an `fc.bias` (zeros
where the head has none).
"""

from __future__ import annotations

from typing import Any

import torch

from headstart.heads.base import Head
from headstart.heads.dims import HeadDims
from headstart.heads.errors import FormatError
from headstart.heads.formats import portable
from headstart.heads.formats.findings import (
    EngineVerdict,
    Row,
    Verdict,
    View,
    draft_map_problem,
    eagle3_rows,
    eagle_config_of,
    eagle_rows,
    geometry_notes,
    guarded,
    llama_sizes,
    match_rows,
    parse_problems,
    rope_problems,
)

ENGINE = "SGLang 0.5.23"
WRONG, REFUSES, LOADS = Verdict.WRONG, Verdict.REFUSES, Verdict.LOADS
EAGLE_ARCHITECTURE = "LlamaForCausalLMEagle"
EAGLE3_ARCHITECTURE = "LlamaForCausalLMEagle3"

FC_BIAS = Row("fc.bias", ("H",), WRONG, "SGLang's fc has a bias, which stays random: export zeros")


def check(seen: View, target: HeadDims | None) -> EngineVerdict:
    """Verdict of SGLang on a directory."""
    found = EngineVerdict(ENGINE)
    if seen.family in ("dflash", "draft_model"):
        found.add(Verdict.UNKNOWN, f"what it does with a {seen.family} has not been checked")
        return found
    if seen.family not in ("eagle", "eagle3"):
        found.add(REFUSES, "SGLang serves EAGLE heads only, no Medusa" if seen.family else "no EAGLE head")
        return found
    return guarded(found, lambda: (_eagle if seen.family == "eagle" else _eagle3)(found, seen, target))


def _common(found: EngineVerdict, seen: View, target: HeadDims | None, architecture: str) -> dict[str, int]:
    config = seen.config
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or architecture not in architectures:
        found.add(REFUSES, f"architectures is {architectures!r}, expected [{architecture!r}]")
    for problem in parse_problems(seen.raw.config):
        found.add(REFUSES, problem)
    sizes = llama_sizes(config, "config.json")
    if config.get("hidden_act", "silu") != "silu":
        found.add(REFUSES, f"hidden_act is {config['hidden_act']!r}; its MLP knows silu")
    if sizes["layers"] != 1:
        found.add(WRONG, f"num_hidden_layers is {sizes['layers']} and the file holds one layer: the others stay random")
    for problem in rope_problems(config, "config.json", target):
        found.add(WRONG, problem)
    for note in geometry_notes(config, target):
        found.add(LOADS, note)
    if config.get("tie_word_embeddings", False):
        found.add(WRONG, "tie_word_embeddings is true: SGLang puts the embeddings in the place of lm_head; write false")
    if target is not None and sizes["D"] != target.hidden_size:
        found.add(REFUSES, f"reads hidden states of width {sizes['D']}, the target's are {target.hidden_size} wide")
    if target is not None and sizes["V"] != target.vocab_size:
        found.add(
            WRONG, f"vocab_size is {sizes['V']}, the target's {target.vocab_size}: the head belongs to another target"
        )
    return sizes


def _skipped(found: EngineVerdict, seen: View, known: set[str]) -> None:
    odd = [n for n in sorted(set(seen.names) - known) if not n.endswith(".bias") or seen.nonzero(n)] + seen.strangers
    if odd:
        found.add(WRONG, f"{', '.join(odd[:6])} would be skipped in silence")


def _eagle(found: EngineVerdict, seen: View, target: HeadDims | None) -> None:
    sizes = _common(found, seen, target, EAGLE_ARCHITECTURE)
    rows = [*eagle_rows(WRONG), FC_BIAS]
    match_rows(found, seen, rows, sizes)
    if "lm_head.weight" in seen.names:
        found.add(LOADS, "lm_head.weight is skipped: the target's is used")
    _skipped(found, seen, {row.name for row in rows} | {"embed_tokens.weight", "lm_head.weight"})


def _eagle3(found: EngineVerdict, seen: View, target: HeadDims | None) -> None:
    config = seen.config
    sizes = _common(found, seen, target, EAGLE3_ARCHITECTURE)
    match_rows(found, seen, eagle3_rows(WRONG), sizes)
    if config.get("norm_before_residual"):
        found.add(WRONG, "norm_before_residual is true: SGLang's residual is always the un-normed one")
    if config.get("attention_bias"):
        found.add(WRONG, "attention_bias is true: SGLang drops the biases in silence")
    nested = eagle_config_of(config)
    for name in ("norm_before_fc", "fc_norm", "norm_output"):
        if config.get(name) or nested.get(name):
            found.add(WRONG, f"{name} is true: SGLang reads it differently")
    _draft_vocabulary(found, seen, sizes)
    _feature_layers(found, config.get("eagle_aux_hidden_state_layer_ids"), nested, target)
    known = {row.name for row in eagle3_rows(WRONG)} | {"embed_tokens.weight", "lm_head.weight", "d2t", "t2d"}
    _skipped(found, seen, known)
    if sizes["H"] != sizes["D"] and "embed_tokens.weight" not in seen.names:
        found.add(
            WRONG, f"embed_tokens.weight is missing and hidden_size {sizes['H']} is not the target's: it stays random"
        )


def _draft_vocabulary(found: EngineVerdict, seen: View, sizes: dict[str, int]) -> None:
    size, vocab = sizes["U"], sizes["V"]
    if seen.config.get("draft_vocab_size") is None:
        found.add(WRONG, "draft_vocab_size is missing: SGLang takes the target's lm_head instead of the head's own")
    shape = seen.shape("lm_head.weight")
    if shape is None:
        found.add(WRONG, "lm_head.weight is missing: it stays random")
    elif shape != (size, sizes["H"]):
        found.add(REFUSES, f"lm_head.weight is {list(shape)}, config.json makes it [{size}, {sizes['H']}]")
    if "d2t" not in seen.names and size < vocab:
        found.add(
            WRONG, f"d2t is missing with draft_vocab_size {size} < vocab_size {vocab}: draft ids pass as target ids"
        )
    elif problem := draft_map_problem(seen, size, vocab):
        found.add(WRONG, problem)


def _feature_layers(found: EngineVerdict, top: Any, nested: dict[str, Any], target: HeadDims | None) -> None:
    inner = nested.get("eagle_aux_hidden_state_layer_ids")
    read = [k + 1 for k in inner] if isinstance(inner, list) and all(type(k) is int for k in inner) else None
    if inner is not None and read is None:
        found.add(REFUSES, f"eagle_config.eagle_aux_hidden_state_layer_ids is {inner!r}, expected a list of integers")
        return
    if read is None and target is not None:
        read = [2, target.num_layers // 2, target.num_layers - 3]
    if isinstance(top, list) and read is None:
        found.add(
            WRONG,
            f"feature layers {top} stand at top level only, which SGLang does not read: it takes 2, L//2, L-3. Write "
            f"{[k - 1 for k in top if type(k) is int]} as eagle_config.eagle_aux_hidden_state_layer_ids",
        )
    elif isinstance(top, list) and read != top:
        found.add(
            WRONG,
            f"SGLang adds 1 to eagle_config.eagle_aux_hidden_state_layer_ids and reads {read}; the ids at top level, "
            f"which vLLM reads, say {top}: write {[k - 1 for k in top if type(k) is int]} there",
        )
    if read is not None and (len(set(read)) != 3 or sorted(read) != read or read[0] < 1):
        found.add(WRONG, f"feature layers {read}: three distinct ascending ones are needed")
    elif read is not None and target is not None and read[-1] >= target.num_layers:
        found.add(
            WRONG, f"feature layer {read[-1]} is beyond the input of the target's last layer ({target.num_layers - 1})"
        )


def contents(head: Head, provenance: dict[str, Any]) -> portable.Contents:
    """EAGLE-3: the portable directory. EAGLE-1: SGLang's architecture name and an `fc.bias`, zeros for a head without.

    Raises: FormatError for families SGLang does not serve.
    """
    if head.family == "eagle3":
        return portable.contents(head)
    if head.family != "eagle":
        raise FormatError(f"export.engines: SGLang does not serve {head.family}; expected eagle or eagle3")
    config = {**portable.portable_config(head), "architectures": [EAGLE_ARCHITECTURE]}
    tensors = portable.portable_tensors(head)
    weight = tensors["fc.weight"]
    tensors.setdefault("fc.bias", torch.zeros(weight.shape[0], dtype=weight.dtype, device="cpu"))
    return portable.Contents("sglang", config, tensors)
