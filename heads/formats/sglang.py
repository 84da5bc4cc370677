"""SGLang 0.5.23 (read from its source): EAGLE-1 and EAGLE-3, no Medusa. Unknown tensors are skipped in silence.

EAGLE-3 takes the portable directory. EAGLE-1 needs its own: another architecture name, and an `fc.bias` (zeros
where the head has none).
"""

from __future__ import annotations

import shlex
from typing import Any

import torch

from headstart.heads.base import Head
from headstart.heads.checkpoints.head_files import Contents
from headstart.heads.families import FAMILIES
from headstart.heads.formats.eagle_rules import (
    check_activation,
    check_draft_map,
    check_lm_head,
    check_own_embeddings,
    eagle3_tensors,
    eagle_config_of,
    eagle_tensors,
    llama_sizes,
)
from headstart.heads.formats.format import Format, Launch, Rules
from headstart.heads.formats.verdicts import WRONG, Case, TensorRule

EAGLE_ARCHITECTURE = "LlamaForCausalLMEagle"
EAGLE3_ARCHITECTURE = "LlamaForCausalLMEagle3"

FC_BIAS = TensorRule("fc.bias", ("H",), WRONG, "SGLang's fc has a bias, which stays random: export zeros")


def _common(case: Case, architecture: str) -> dict[str, int]:
    config = case.config
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or architecture not in architectures:
        case.refuse(f"architectures is {architectures!r}, expected [{architecture!r}]")
    case.require_parsed()
    sizes = llama_sizes(config)
    check_activation(case, config)
    if sizes["layers"] != 1:
        case.misread(f"num_hidden_layers is {sizes['layers']} and the file holds one layer: the others stay random")
    case.compare_geometry(config)
    if config.get("tie_word_embeddings", False):
        case.misread("tie_word_embeddings is true: SGLang puts the embeddings in the place of lm_head; write false")
    case.compare_target(sizes["D"], sizes["V"])
    return sizes


def _skipped(case: Case, known: set[str]) -> None:
    odd = [n for n in sorted(set(case.names) - known) if not n.endswith(".bias") or case.nonzero(n)] + case.strangers
    if odd:
        case.misread(f"{', '.join(odd[:6])} would be skipped in silence")


def _eagle(case: Case) -> None:
    sizes = _common(case, EAGLE_ARCHITECTURE)
    rows = [*eagle_tensors(WRONG), FC_BIAS]
    case.match(rows, sizes)
    if "lm_head.weight" in case.names:
        case.note("lm_head.weight is skipped: the target's is used")
    _skipped(case, {row.name for row in rows} | {"embed_tokens.weight", "lm_head.weight"})


def _eagle3(case: Case) -> None:
    config = case.config
    sizes = _common(case, EAGLE3_ARCHITECTURE)
    case.match(eagle3_tensors(WRONG), sizes)
    if config.get("norm_before_residual"):
        case.misread("norm_before_residual is true: SGLang's residual is always the un-normed one")
    if config.get("attention_bias"):
        case.misread("attention_bias is true: SGLang drops the biases in silence")
    nested = eagle_config_of(config)
    for name in ("norm_before_fc", "fc_norm", "norm_output"):
        if config.get(name) or nested.get(name):
            case.misread(f"{name} is true: SGLang reads it differently")
    _draft_vocabulary(case, sizes)
    _feature_layers(case, config.get("eagle_aux_hidden_state_layer_ids"), nested)
    known = {row.name for row in eagle3_tensors(WRONG)} | {"embed_tokens.weight", "lm_head.weight", "d2t", "t2d"}
    _skipped(case, known)
    check_own_embeddings(case, sizes)


def _draft_vocabulary(case: Case, sizes: dict[str, int]) -> None:
    if case.config.get("draft_vocab_size") is None:
        case.misread("draft_vocab_size is missing: SGLang takes the target's lm_head instead of the head's own")
    check_lm_head(case, sizes, WRONG, "lm_head.weight is missing: it stays random")
    check_draft_map(case, sizes)


def _feature_layers(case: Case, top: Any, nested: dict[str, Any]) -> None:
    inner = nested.get("eagle_aux_hidden_state_layer_ids")
    read = [k + 1 for k in inner] if isinstance(inner, list) and all(type(k) is int for k in inner) else None
    if inner is not None and read is None:
        case.refuse(f"eagle_config.eagle_aux_hidden_state_layer_ids is {inner!r}, expected a list of integers")
        return
    if read is None and case.target is not None:
        read = [2, case.target.num_layers // 2, case.target.num_layers - 3]
    if isinstance(top, list) and read is None:
        case.misread(
            f"feature layers {top} stand at top level only, which SGLang does not read: it takes 2, L//2, L-3. Write "
            f"{[k - 1 for k in top if type(k) is int]} as eagle_config.eagle_aux_hidden_state_layer_ids"
        )
    elif isinstance(top, list) and read != top:
        case.misread(
            f"SGLang adds 1 to eagle_config.eagle_aux_hidden_state_layer_ids and reads {read}; the ids at top level, "
            f"which vLLM reads, say {top}: write {[k - 1 for k in top if type(k) is int]} there"
        )
    if read is not None and (len(set(read)) != 3 or sorted(read) != read or read[0] < 1):
        case.misread(f"feature layers {read}: three distinct ascending ones are needed")
    elif read is not None and case.target is not None and read[-1] >= case.target.num_layers:
        case.misread(
            f"feature layer {read[-1]} is beyond the input of the target's last layer ({case.target.num_layers - 1})"
        )


def _write_eagle(head: Head, provenance: dict[str, Any]) -> Contents:
    """SGLang's name of the architecture, and an `fc.bias`: zeros for a head without."""
    files = FAMILIES["eagle"].files
    config, tensors = {**files.config_json(head), "architectures": [EAGLE_ARCHITECTURE]}, files.tensors(head)
    weight = tensors["fc.weight"]
    tensors.setdefault("fc.bias", torch.zeros(weight.shape[0], dtype=weight.dtype, device="cpu"))
    return Contents("sglang", config, tensors)


def _launch(launch: Launch) -> str:
    return shlex.join(
        [
            "python", "-m", "sglang.launch_server", "--model-path", launch.target, "--speculative-algorithm",
            "EAGLE3" if launch.family == "eagle3" else "EAGLE", "--speculative-draft-model-path", launch.head,
            "--speculative-num-steps", str(launch.tokens), "--speculative-eagle-topk", "1",
            "--speculative-num-draft-tokens", str(launch.tokens + 1), *launch.limit("--context-length"),
        ]
    )  # fmt: skip


FORMAT = Format(
    key="sglang",
    name="SGLang",
    title="SGLang",
    version="SGLang 0.5.23",
    serves={"eagle": Rules(_eagle, _write_eagle, shards=True), "eagle3": Rules(_eagle3, shards=True)},
    launch=_launch,
    not_served=lambda case: "SGLang serves EAGLE heads only, no Medusa" if case.family else "no EAGLE head",
    unchecked=("dflash", "draft_model"),
)
