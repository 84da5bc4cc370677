"""SGLang 0.5.23 (read from its source): EAGLE-1 and EAGLE-3, block heads (sglang_block.py), no Medusa.

Unknown tensors are skipped in silence.

EAGLE-3 takes the portable directory. EAGLE-1 needs its own: another architecture name, and an `fc.bias` (zeros
where the head has none).
"""

from __future__ import annotations

import shlex
from typing import Any

import torch

from headstart.heads.base import Head
from headstart.heads.checkpoints.geometry import are_integers
from headstart.heads.checkpoints.head_files import Contents
from headstart.heads.checkpoints.tensor_map import some
from headstart.heads.families import FAMILIES
from headstart.heads.families.eagle3.files import names_qwen3
from headstart.heads.families.eagle_files import LAYER_IDS, shifted
from headstart.heads.formats.eagle_rules import (
    Eagle3Layout,
    check_draft_map,
    check_later_norms,
    check_layer,
    check_lm_head,
    check_own_embeddings,
    eagle_config_of,
    eagle_tensors,
    fc_norm_of,
    file_layers,
    usual_layers,
)
from headstart.heads.formats.format import Format, Launch, Rules
from headstart.heads.formats.handling import WRONG, Case, TensorRule
from headstart.heads.formats.sglang_block import (
    ALGORITHMS,
    SCHEDULED,
    STEP_RATES,
    TEMPERATURES,
    block_words,
    check_causal,
    check_dflash,
    check_domino,
    check_dspark,
    step_rates,
    temperatures,
)

EAGLE_ARCHITECTURE = "LlamaForCausalLMEagle"
EAGLE3_ARCHITECTURE = "LlamaForCausalLMEagle3"

FC_BIAS = TensorRule("fc.bias", ("H",), WRONG, "SGLang's fc has a bias, which stays random: export zeros")


def _common(case: Case, architecture: str, layers: int = 1) -> dict[str, int]:
    """The rules of both families. Args: layers: of the file. Returns: llama_sizes."""
    case.require_architecture((architecture,), case.config.get("architectures"))
    sizes = check_layer(case, case.config, layers=layers)
    if case.config.get("tie_word_embeddings", False):
        case.misread("tie_word_embeddings is true: SGLang puts the embeddings in the place of lm_head; write false")
    return sizes


def _skipped(case: Case, known: set[str]) -> None:
    odd = [name for name in case.unexplained(known) if not name.endswith(".bias") or case.nonzero(name)]
    if odd:
        case.misread(f"{some(odd)} would be skipped in silence")


def _eagle(case: Case) -> None:
    sizes = _common(case, EAGLE_ARCHITECTURE)
    rules = [*eagle_tensors(WRONG), FC_BIAS]
    case.match(rules, sizes)
    if "lm_head.weight" in case.names:
        case.note("lm_head.weight is skipped: the target's is used")
    _skipped(case, {rule.name for rule in rules} | {"embed_tokens.weight", "lm_head.weight"})


def _eagle3(case: Case) -> None:
    config = case.config
    if names_qwen3(config):
        case.refuse(
            "its EAGLE-3 layers have no q/k norms (head.qk_norm): serve this head with vLLM (export.engines=[vllm])"
        )
    layers = file_layers(case.names)
    sizes = _common(case, EAGLE3_ARCHITECTURE, layers)
    layout = Eagle3Layout(min(layers, sizes["layers"]), "hidden_norm", False, fc_norm_of(config, legacy=True))
    rules = layout.tensors(WRONG)
    case.match(rules, sizes)
    check_later_norms(case, layout)
    if layout.fc_norm == "concat" and (config.get("fc_norm") or config.get("use_aux_norm")):
        case.misread("norm_before_fc and fc_norm are both set: it applies one after the other")
    if config.get("norm_before_residual"):
        case.misread("norm_before_residual is true: SGLang's residual is always the un-normed one")
    if config.get("attention_bias"):
        case.misread("attention_bias is true: SGLang drops the biases in silence")
    nested = eagle_config_of(config)
    for name in ("fc_norm", "norm_output"):
        if nested.get(name) and not config.get(name):
            case.misread(f"{name} is read at top level, not inside eagle_config")
    if config.get("draft_vocab_size") is None:
        case.misread("draft_vocab_size is missing: SGLang takes the target's lm_head instead of the head's own")
    check_lm_head(case, sizes, WRONG, "it stays random")
    check_draft_map(case, sizes)
    _feature_layers(case, config.get(LAYER_IDS), nested.get(LAYER_IDS))
    known = {rule.name for rule in rules} | layout.unread()
    _skipped(case, known | {"embed_tokens.weight", "lm_head.weight", "d2t", "t2d"})
    check_own_embeddings(case, sizes)


def _feature_layers(case: Case, top: Any, inner: Any) -> None:
    """Args: top, inner: the ids at top level, which vLLM reads, and those inside eagle_config, which SGLang reads."""
    if inner is not None and not are_integers(inner):
        case.refuse(f"eagle_config.{LAYER_IDS} is {inner!r}, expected a list of integers")
        return
    layers = None if case.target is None else case.target.num_layers
    read = usual_layers(case.target) if inner is None else shifted(inner, 1)
    if isinstance(top, list) and read is None:
        case.misread(
            f"feature layers {top} stand at top level only, which SGLang does not read: it takes 2, L//2, L-3. Write "
            f"{shifted(top, -1)} as eagle_config.{LAYER_IDS}"
        )
    elif isinstance(top, list) and read != top:
        case.misread(
            f"SGLang adds 1 to eagle_config.{LAYER_IDS} and reads {read}; the ids at top level, which vLLM reads, say "
            f"{top}: write {shifted(top, -1)} there"
        )
    if read is None:
        return
    if len(set(read)) != 3 or sorted(read) != read or read[0] < 1:
        case.misread(f"feature layers {read}: three distinct ascending ones are needed")
    elif layers is not None and read[-1] >= layers:
        case.misread(f"feature layer {read[-1]} is beyond the input of the target's last layer ({layers - 1})")


def _write_eagle(head: Head, provenance: dict[str, Any]) -> Contents:
    """SGLang's name of the architecture, and an `fc.bias`: zeros for a head without."""
    files = FAMILIES["eagle"].files
    config, tensors = {**files.config_json(head), "architectures": [EAGLE_ARCHITECTURE]}, files.tensors(head)
    weight = tensors["fc.weight"]
    tensors.setdefault("fc.bias", torch.zeros(weight.shape[0], dtype=weight.dtype, device="cpu"))
    return Contents("sglang", config, tensors)


def _launch(launch: Launch) -> str:
    serve = ["python", "-m", "sglang.launch_server", "--model-path", launch.target]
    if launch.family in ALGORITHMS:
        drafts = block_words(launch)
    else:
        drafts = [
            "--speculative-algorithm", "EAGLE3" if launch.family == "eagle3" else "EAGLE",
            "--speculative-draft-model-path", launch.head, "--speculative-num-steps", str(launch.tokens),
            "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", str(launch.tokens + 1),
        ]  # fmt: skip
    comment = SCHEDULED if launch.files else ""
    return comment + shlex.join([*serve, *drafts, *launch.limit("--context-length")])


FORMAT = Format(
    key="sglang",
    name="SGLang",
    title="SGLang",
    version="SGLang 0.5.23",
    serves={
        "eagle": Rules(_eagle, _write_eagle, shards=True),
        "eagle3": Rules(_eagle3, shards=True),
        "dflash": Rules(check_dflash, shards=True),
        "dspark": Rules(check_dspark, shards=True),
        "jetspec": Rules(check_causal, shards=True),
        "domino": Rules(check_domino, shards=True, draws=False),
    },
    launch=_launch,
    before=Case.require_parsed,
    unchecked=("draft_model",),
    # EAGLE heads with one candidate per step only, as the command says
    block="--speculative-use-block-verification (CUDA and ROCm)",
    beside={TEMPERATURES: temperatures, STEP_RATES: step_rates},
)
