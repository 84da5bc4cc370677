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
from headstart.heads.dims import HeadDims
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
from headstart.heads.formats.verdicts import (
    LOADS,
    REFUSES,
    WRONG,
    EngineVerdict,
    HeadDirectory,
    TensorRule,
    check_geometry,
    check_parses,
    check_target,
    match_tensors,
)

EAGLE_ARCHITECTURE = "LlamaForCausalLMEagle"
EAGLE3_ARCHITECTURE = "LlamaForCausalLMEagle3"

FC_BIAS = TensorRule("fc.bias", ("H",), WRONG, "SGLang's fc has a bias, which stays random: export zeros")


def _common(verdict: EngineVerdict, seen: HeadDirectory, target: HeadDims | None, architecture: str) -> dict[str, int]:
    config = seen.config
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or architecture not in architectures:
        verdict.add(REFUSES, f"architectures is {architectures!r}, expected [{architecture!r}]")
    check_parses(verdict, seen)
    sizes = llama_sizes(config)
    check_activation(verdict, config)
    if sizes["layers"] != 1:
        verdict.add(
            WRONG, f"num_hidden_layers is {sizes['layers']} and the file holds one layer: the others stay random"
        )
    check_geometry(verdict, config, target)
    if config.get("tie_word_embeddings", False):
        verdict.add(
            WRONG, "tie_word_embeddings is true: SGLang puts the embeddings in the place of lm_head; write false"
        )
    check_target(verdict, target, sizes["D"], sizes["V"])
    return sizes


def _skipped(verdict: EngineVerdict, seen: HeadDirectory, known: set[str]) -> None:
    odd = [n for n in sorted(set(seen.names) - known) if not n.endswith(".bias") or seen.nonzero(n)] + seen.strangers
    if odd:
        verdict.add(WRONG, f"{', '.join(odd[:6])} would be skipped in silence")


def _eagle(verdict: EngineVerdict, seen: HeadDirectory, target: HeadDims | None) -> None:
    sizes = _common(verdict, seen, target, EAGLE_ARCHITECTURE)
    rows = [*eagle_tensors(WRONG), FC_BIAS]
    match_tensors(verdict, seen, rows, sizes)
    if "lm_head.weight" in seen.names:
        verdict.add(LOADS, "lm_head.weight is skipped: the target's is used")
    _skipped(verdict, seen, {row.name for row in rows} | {"embed_tokens.weight", "lm_head.weight"})


def _eagle3(verdict: EngineVerdict, seen: HeadDirectory, target: HeadDims | None) -> None:
    config = seen.config
    sizes = _common(verdict, seen, target, EAGLE3_ARCHITECTURE)
    match_tensors(verdict, seen, eagle3_tensors(WRONG), sizes)
    if config.get("norm_before_residual"):
        verdict.add(WRONG, "norm_before_residual is true: SGLang's residual is always the un-normed one")
    if config.get("attention_bias"):
        verdict.add(WRONG, "attention_bias is true: SGLang drops the biases in silence")
    nested = eagle_config_of(config)
    for name in ("norm_before_fc", "fc_norm", "norm_output"):
        if config.get(name) or nested.get(name):
            verdict.add(WRONG, f"{name} is true: SGLang reads it differently")
    _draft_vocabulary(verdict, seen, sizes)
    _feature_layers(verdict, config.get("eagle_aux_hidden_state_layer_ids"), nested, target)
    known = {row.name for row in eagle3_tensors(WRONG)} | {"embed_tokens.weight", "lm_head.weight", "d2t", "t2d"}
    _skipped(verdict, seen, known)
    check_own_embeddings(verdict, seen, sizes)


def _draft_vocabulary(verdict: EngineVerdict, seen: HeadDirectory, sizes: dict[str, int]) -> None:
    if seen.config.get("draft_vocab_size") is None:
        verdict.add(WRONG, "draft_vocab_size is missing: SGLang takes the target's lm_head instead of the head's own")
    check_lm_head(verdict, seen, sizes, WRONG, "lm_head.weight is missing: it stays random")
    check_draft_map(verdict, seen, sizes)


def _feature_layers(verdict: EngineVerdict, top: Any, nested: dict[str, Any], target: HeadDims | None) -> None:
    inner = nested.get("eagle_aux_hidden_state_layer_ids")
    read = [k + 1 for k in inner] if isinstance(inner, list) and all(type(k) is int for k in inner) else None
    if inner is not None and read is None:
        verdict.add(REFUSES, f"eagle_config.eagle_aux_hidden_state_layer_ids is {inner!r}, expected a list of integers")
        return
    if read is None and target is not None:
        read = [2, target.num_layers // 2, target.num_layers - 3]
    if isinstance(top, list) and read is None:
        verdict.add(
            WRONG,
            f"feature layers {top} stand at top level only, which SGLang does not read: it takes 2, L//2, L-3. Write "
            f"{[k - 1 for k in top if type(k) is int]} as eagle_config.eagle_aux_hidden_state_layer_ids",
        )
    elif isinstance(top, list) and read != top:
        verdict.add(
            WRONG,
            f"SGLang adds 1 to eagle_config.eagle_aux_hidden_state_layer_ids and reads {read}; the ids at top level, "
            f"which vLLM reads, say {top}: write {[k - 1 for k in top if type(k) is int]} there",
        )
    if read is not None and (len(set(read)) != 3 or sorted(read) != read or read[0] < 1):
        verdict.add(WRONG, f"feature layers {read}: three distinct ascending ones are needed")
    elif read is not None and target is not None and read[-1] >= target.num_layers:
        verdict.add(
            WRONG, f"feature layer {read[-1]} is beyond the input of the target's last layer ({target.num_layers - 1})"
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
    not_served=lambda seen: "SGLang serves EAGLE heads only, no Medusa" if seen.family else "no EAGLE head",
    unchecked=("dflash", "draft_model"),
)
