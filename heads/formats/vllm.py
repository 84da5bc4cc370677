"""vLLM 0.32: what it reads for each family, what it does with a faulty file, and the command that serves a head.

The rules are read from its loaders, and `scripts/parity/vllm.sh` runs it. Its EAGLE and Medusa loaders do not notice
a *missing* tensor, which stays uninitialised. An unexpected tensor stops an EAGLE load; the Medusa loader drops it.
"""

from __future__ import annotations

import json
import math
import shlex
from typing import Any

import torch

from headstart.heads.checkpoints.geometry import are_integers, integer
from headstart.heads.checkpoints.tensor_map import some
from headstart.heads.errors import FormatError
from headstart.heads.families.eagle3.files import LEGACY_NORMS
from headstart.heads.families.eagle_files import LAYER_IDS, MASK_HIDDEN, MASK_TOKENS, shifted
from headstart.heads.formats.eagle_rules import (
    Eagle3Layout,
    check_draft_map,
    check_later_norms,
    check_layer,
    check_lm_head,
    check_own_embeddings,
    check_reach,
    eagle_config_of,
    eagle_tensors,
    fc_norm_of,
    file_layers,
    mask_token_problem,
)
from headstart.heads.formats.format import Format, Launch, Rules, Versions
from headstart.heads.formats.handling import LOADS, REFUSES, WRONG, Case
from headstart.heads.formats.medusa_rules import block_tensors, matrix_tensors, medusa_counts
from headstart.heads.formats.vllm_block import check_causal, check_dflash, check_dflash2, check_dspark
from headstart.heads.formats.vllm_draft_model import check_draft_model
from headstart.heads.formats.vllm_targets import check_target_class, check_window, model_impl, served

EAGLE_ARCHITECTURES = ("EagleLlamaForCausalLM", "LlamaForCausalLM")
EAGLE3_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
#: the class whose layers have q/k norms
QWEN3_ARCHITECTURES = ("Eagle3Qwen3ForCausalLM", "Qwen3ForCausalLM")
#: tensors that an EAGLE-3 load takes, and does not need
EAGLE3_OPTIONAL = {"embed_tokens.weight", "lm_head.weight", "d2t", "t2d", "mask_hidden"}
#: what --max-lora-rank can be
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def _medusa(case: Case) -> None:
    config = dict(case.config)
    if config.get("model_type") != "medusa":
        case.refuse(f"model_type is {config.get('model_type')!r}, expected 'medusa'")
    for key in list(config):  # as vLLM does: the last key that holds both words wins
        for word, ours in (("heads", "num_heads"), ("layers", "num_hidden_layers")):
            if "num" in key and word in key:
                if key != ours and config.get(ours) not in (None, config[key]):
                    case.misread(
                        f"{key} = {config[key]!r} is taken for {ours} (any key holding num and {word} is): remove it"
                    )
                config[ours] = config.pop(key)
                break
    heads, layers = medusa_counts(config, ("num_heads", "num_hidden_layers"), heads=5)
    sizes = {}
    for key, symbol, default in (("hidden_size", "D", 4096), ("vocab_size", "V", 32001)):
        if config.get(key) is None:
            case.note(f"{key} is missing and defaults to {default}")
        sizes[symbol] = integer(config, key, "config.json", default)
    biased, stays_random = config.get("medusa_fc_bias", False), (WRONG, "it stays random")
    dropped = [] if biased else [n for n in sorted(case.names) if n.endswith(".bias") and case.nonzero(n)]
    if dropped:
        case.misread(f"{dropped[0]} (and all biases) is dropped in silence: set medusa_fc_bias to true")
    sizes["U"] = integer(config, "truncated_vocab_size", "config.json", sizes["V"])
    shared, mapped = bool(config.get("original_lm_head")), set[str]()
    if sizes["U"] != sizes["V"] and not shared:
        case.refuse("truncated_vocab_size: per-head matrices of a reduced vocabulary do not load")
    elif sizes["U"] < sizes["V"]:
        mapped = {"token_map"}
        _token_map(case, sizes["U"], sizes["V"])
        if case.shape("lm_heads.0.weight") == (sizes["V"], sizes["D"]):
            sizes["U"] = sizes["V"]  # vLLM takes the rows that token_map names
    rules = block_tensors(heads, layers, *stays_random, biases=bool(biased))
    rules += matrix_tensors(1 if shared else heads, *stays_random, rows="U" if shared else "V")
    case.match(rules, sizes)
    known = {rule.name for rule in rules} | {name for name in case.names if name.endswith(".bias")}
    if extra := [name for name in case.unexplained(known) if name not in mapped]:
        case.misread(f"{some(extra)} would be dropped in silence")
    case.note(f"num_speculative_tokens must be {heads} or fewer")
    case.compare_target(sizes["D"], sizes["V"])


def _token_map(case: Case, size: int, vocab: int) -> None:
    """Check the target ids of a reduced vocabulary. This rule is read from vLLM's source; no such head was run."""
    info = case.raw.tensors.get("token_map")
    if info is None:
        case.refuse(f"truncated_vocab_size is {size} of {vocab} and token_map [{size}] is missing")
        return
    if info.shape != (size,) or info.dtype not in (torch.int64, torch.int32):
        case.refuse(f"token_map is {info.dtype} {list(info.shape)}, expected int64 [{size}]")
        return
    ids = case.raw.read("token_map")
    if int(ids.min()) < 0 or int(ids.max()) >= vocab or len(set(ids.tolist())) != size:
        case.misread(
            f"token_map holds no {size} distinct ids below {vocab}: vLLM drafts other tokens than were trained"
        )


def _eagle(case: Case) -> None:
    config = case.config
    if "speculators_model_type" in config:
        case.refuse("vLLM's speculators reader knows no 'eagle': export it first")
        return
    inner = case.raw.config.get("model")
    if isinstance(inner, dict):
        for key in sorted({"architectures", "model_type"} - set(inner)):
            case.refuse(f"the nested model config needs {key}")
    case.require_architecture(EAGLE_ARCHITECTURES, (inner if isinstance(inner, dict) else config).get("architectures"))
    sizes, rules = check_layer(case, config), eagle_tensors(WRONG)
    case.match(rules, sizes)
    if case.nonzero("fc.bias"):
        case.misread("fc.bias is not zero and is dropped in silence: serve it with SGLang (export.engines=[sglang])")
    if "lm_head.weight" in case.names:
        case.refuse("lm_head.weight must be absent: EAGLE-1 uses the target's")
    if "layers.0.input_layernorm.weight" in case.names:
        case.refuse("layers.0.input_layernorm.weight: vLLM's EAGLE-1 layer has none")
    told = {"lm_head.weight", "layers.0.input_layernorm.weight", "fc.bias"}
    _unexpected(case, {rule.name for rule in rules} | {"embed_tokens.weight"} | told, config)
    _embedding(case, sizes)
    check_window(case)


def _eagle3(case: Case) -> None:
    _eagle3_sizes(case)


def _eagle3_sizes(case: Case) -> dict[str, int]:
    """The rules of EAGLE-3. Returns: as llama_sizes."""
    config, architectures = case.config, case.config.get("architectures")
    if "speculators_model_type" in config:
        config = _speculators(case)
        architectures = [QWEN3_ARCHITECTURES[0]] if config.get("model_type") == "qwen3" else []
    else:
        case.require_architecture((*EAGLE3_ARCHITECTURES, *QWEN3_ARCHITECTURES), architectures)
    layers = file_layers(case.names)
    sizes = check_layer(case, config, layers=layers)
    normed = isinstance(architectures, list) and any(name in QWEN3_ARCHITECTURES for name in architectures)
    layout = Eagle3Layout(min(layers, sizes["layers"]), "input_layernorm", normed, fc_norm_of(config))
    rules = layout.tensors(WRONG)
    check_later_norms(case, layout)
    if config.get("draft_vocab_size") is None:
        case.note("draft_vocab_size is missing and taken for vocab_size")
    case.match(rules, sizes)
    _draft_vocabulary(case, sizes)
    nested = eagle_config_of(config)
    if nested.get("use_aux_hidden_state", True) is not True:
        case.misread("eagle_config.use_aux_hidden_state is false: fc is left out and the last hidden state goes in")
    _feature_layers(case, config.get(LAYER_IDS), nested.get(LAYER_IDS))
    if layout.fc_norm == "concat" and config.get("fc_norm"):
        case.misread("norm_before_fc and fc_norm are both set: it applies one after the other")
    legacy = [name for name in case.raw.tensors if name.removeprefix("model.") in LEGACY_NORMS]
    if legacy:
        case.refuse(f"unexpected tensors {some(legacy)}: it calls them fc_norm.0 … 2, and reads fc_norm in config.json")
    # input_norm is dropped where norm_before_fc is not set
    dropped = {"input_norm.weight"} - {rule.name for rule in rules}
    if dropped & set(case.names):
        case.misread("input_norm.weight is dropped in silence: norm_before_fc is not set in config.json")
    told = dropped | {LEGACY_NORMS[name.removeprefix("model.")] for name in legacy}
    _unexpected(case, {rule.name for rule in rules} | EAGLE3_OPTIONAL | layout.unread() | told, config)
    check_own_embeddings(case, sizes)
    _embedding(case, sizes)
    check_target_class(case)
    check_window(case)
    return sizes


def _peagle(case: Case) -> None:
    """P-EAGLE: an EAGLE-3 head that drafts all its tokens at once, from masked places."""
    sizes = _eagle3_sizes(case)
    # a bare config and the speculators library's are looked at alike
    tokens = {name: case.config[name] for name in MASK_TOKENS if case.config.get(name) is not None}
    shape, wanted = case.shape(MASK_HIDDEN), f"mask_hidden [1, 1, {sizes['3D']}]"
    if not tokens:
        case.refuse("mask_hidden without mask_token_id (or pard_token, ptd_token_id): parallel drafting needs both")
    elif "speculators_model_type" in case.config and "mask_token_id" not in tokens:
        case.refuse("the speculators layout names the mask token mask_token_id, which is missing")
    for name, token in tokens.items():
        if problem := mask_token_problem(name, token, sizes["V"]):
            case.refuse(problem)
    if len(set(tokens.values())) > 1:
        case.misread(f"several mask tokens are named, {tokens}: the first counts. Keep the one that was trained")
    if shape is None:
        case.refuse(f"{wanted} is missing: parallel drafting needs it")
    elif math.prod(shape) != sizes["3D"]:
        case.refuse(f"mask_hidden is {list(shape)}, config.json makes it [1, 1, {sizes['3D']}]")
    if case.shape("embed_tokens.weight") is None and sizes["H"] == sizes["D"]:
        case.misread("embed_tokens.weight is missing: the mask token gets the target's embedding, not the trained one")
    case.note('launch it with "parallel_drafting": true in the speculative config; without, mask_hidden is unused')


def _speculators(case: Case) -> dict[str, Any]:
    outer, layer = case.config, case.config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise FormatError("config.json: transformer_layer_config is missing")
    parallel = outer["speculators_model_type"] == "peagle"
    # where the field is missing, speculators takes false for P-EAGLE and true for EAGLE-3
    if outer.get("norm_before_residual", not parallel):
        case.note("norm_before_residual is true (the default there): vLLM runs it, SGLang and TensorRT-LLM do not")
    names = ("draft_vocab_size", "target_hidden_size", LAYER_IDS, "norm_before_fc", "fc_norm", "norm_output")
    # of P-EAGLE's settings, vLLM takes over the first four alone
    taken = names[:4] if parallel else names
    return {**layer, **{name: outer[name] for name in taken if outer.get(name) is not None}}


def _draft_vocabulary(case: Case, sizes: dict[str, int]) -> None:
    reduced, vocab_size = sizes["U"] < sizes["V"], sizes["V"]
    shared = f"the target's {vocab_size}-row head is shared in silence" if reduced else "the target's is shared"
    check_lm_head(case, sizes, WRONG if reduced else LOADS, shared)
    if "d2t" in case.names and sizes["U"] == vocab_size:
        case.refuse("d2t is not expected when draft_vocab_size equals vocab_size: leave it out")
    else:
        check_draft_map(case, sizes, misshapen=REFUSES)


def _feature_layers(case: Case, top: Any, inner: Any) -> None:
    """Args: top, inner: the ids at top level, which vLLM reads, and those inside eagle_config, which SGLang reads."""
    if not top and inner and are_integers(inner):
        case.misread(
            f"the feature layers stand only inside eagle_config: vLLM takes {inner} as they are, SGLang (whose key it "
            f"is) adds 1. Write {shifted(inner, 1)} as {LAYER_IDS} at top level"
        )
    if isinstance(top, list) and isinstance(inner, list) and shifted(inner, 1) != top:
        case.note(
            f"reads the ids at top level, {top}; SGLang reads {shifted(inner, 1)} from eagle_config: one of the two is "
            "not what the head was trained on"
        )
    ids = top or inner
    if not ids:
        case.note("no feature layers given: vLLM takes 2, L//2 and L-3")
        return
    if not are_integers(ids):
        case.refuse(f"feature layers {ids!r} are no list of integers")
        return
    if len(set(ids)) != len(ids):
        case.refuse(f"feature layers {ids} repeat: vLLM de-duplicates them and fc no longer fits")
    elif len(ids) != 3:
        case.refuse(f"{len(ids)} feature layers {ids}, fc reads three")
    elif sorted(ids) != ids:
        case.misread(f"feature layers {ids} are not ascending: vLLM sorts them, fc was trained in the order given")
    check_reach(case, ids)


def _unexpected(case: Case, known: set[str], config: dict[str, Any]) -> None:
    biases = [name for name in case.names if name.endswith(".bias") and name not in known]
    if config.get("attention_bias") or config.get("bias"):
        if not all(any(name.endswith(f"{p}_proj.bias") for name in biases) for p in "qkv"):
            case.misread("attention_bias is true and q/k/v biases are missing: they stay random")
    elif any(case.nonzero(name) for name in biases):
        case.misread(f"{', '.join(biases[:3])}: biases are dropped in silence without attention_bias")
    if odd := case.unexplained(known | set(biases)):
        case.refuse(f"unexpected tensors {some(odd)}")


def _embedding(case: Case, sizes: dict[str, int]) -> None:
    shape = case.shape("embed_tokens.weight")
    if shape is not None and shape != (sizes["V"], sizes["H"]):
        case.refuse(f"embed_tokens.weight is {list(shape)}, config.json makes it [{sizes['V']}, {sizes['H']}]")


def max_lora_rank(rank: int) -> int:
    """The smallest --max-lora-rank for adapters of this rank."""
    return next((most for most in LORA_RANKS if most >= rank), rank)


#: the name that requests give for the target with its adapter
ADAPTED_NAME = "tuned"


#: family → (method of the speculative config, what else that needs), where the method has not the family's name
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "peagle": ("eagle3", {"parallel_drafting": True}),
    "jetspec": ("dflash", {}),
    "dflash2": ("dflash", {}),
}


#: families of which it drafts any number of tokens, another one in every step. Others draft whole blocks, or nothing:
#: one of its two model runners makes a shorter block of a smaller number, which the head was not trained on
ANY_NUMBER = ("eagle", "eagle3", "draft_model", "dspark")
WHOLE_BLOCKS = ("dflash", "jetspec", "dflash2")
#: families whose confidence head it reads to verify as many drafts as pay
ADAPTIVE = ("dspark",)


def _by_load(launch: Launch) -> tuple[dict[str, Any], str]:
    """What the speculative config says of drafting by load, and a comment above the command.

    The table by batch size was run on 0.32 with EAGLE-3: 4, 2 and 0 tokens were drafted as it said, while requests
    ended, and the answers were those without a draft. Of P-EAGLE and Medusa it drafts a fixed number only: it expects
    as many logits as at its start.
    """
    if launch.confident and launch.family in ADAPTIVE and launch.adapter is None:
        comment = (
            "# enable_adaptive_verification cuts what is verified by the head's confidence (read in vLLM's source, not "
            "run); it needs full CUDA graphs, one pipeline stage and no LoRA: leave it out where vLLM refuses it\n"
        )
        return {"enable_adaptive_verification": True}, comment
    numbers = {row[2] for row in launch.per_batch}
    able = launch.family in ANY_NUMBER or (launch.family in WHOLE_BLOCKS and numbers <= {0, launch.tokens})
    if len(numbers) < 2 or not able:
        return {}, ""
    most = max(launch.tokens, *numbers)
    comment = "# not with data parallelism, where vLLM drafts the same number at every batch size\n"
    if not launch.per_batch[-1][2]:
        comment += f"# from batch {launch.per_batch[-1][0]} on drafting does not pay: there it decodes plainly\n"
    rows = [list(row) for row in launch.per_batch]
    return {"num_speculative_tokens": most, "num_speculative_tokens_per_batch_size": rows}, comment


def _launch(launch: Launch) -> str | None:
    method, more = METHODS.get(launch.family, (launch.family, {}))
    if not served(launch.model_type, method):
        return None
    by_load, comment = _by_load(launch)
    spec = {"method": method, "model": launch.head, "num_speculative_tokens": launch.tokens, **more, **by_load}
    words = ["vllm", "serve", launch.target, *launch.limit("--max-model-len")]
    if (implementation := model_impl(launch.model_type, method)) is not None:
        words += ["--model-impl", implementation]
    if launch.adapter is not None:  # run on 0.32: the features that the head reads carry the adapter
        words += ["--enable-lora", "--max-lora-rank", str(max_lora_rank(launch.rank))]
        words += ["--lora-modules", f"{ADAPTED_NAME}={launch.adapter}"]
        comment += f'# requests name the model "{ADAPTED_NAME}"; under the name of the base, the base answers\n'
    return comment + shlex.join([*words, "--speculative-config", json.dumps(spec, ensure_ascii=False)])


FORMAT = Format(
    key="vllm",
    name="vLLM",
    title="vLLM",
    version="vLLM 0.32",
    serves={
        "medusa": Rules(
            _medusa, shards=True, draws=False,
            versions=Versions("0.32", "0.32", "0.33 has no Medusa model in its registry any more"),
        ),  # fmt: skip
        "eagle": Rules(_eagle, shards=True),
        "eagle3": Rules(_eagle3, shards=True),
        "peagle": Rules(_peagle, shards=True),
        "dflash": Rules(check_dflash, shards=True),
        "dspark": Rules(check_dspark, shards=True),
        "dflash2": Rules(
            check_dflash2, shards=True,
            versions=Versions(None, None, "0.32 has no DFlash2DraftModel; rules of 0.33 were read, not run", "0.33"),
        ),
        "jetspec": Rules(check_causal, shards=True),
        "draft_model": Rules(check_draft_model, draws=False),
    },
    launch=_launch,
    before=Case.require_parsed,
    adapters=True,
    # the drafts are the likeliest ones by default, which block verification gains nothing from
    block='"draft_sample_method": "probabilistic", "rejection_sample_method": "block" in the speculative config',
    dropped={"mlp_speculator": "MLP speculators are no longer in vLLM's registry"},
)
