"""llama.cpp (revision 0c1e570): EAGLE-3 heads as one GGUF file, `eagle3.gguf`, beside the portable files.

Its rules are read from src/models/eagle3.cpp and common/speculative.cpp, and `scripts/parity/llama_cpp.sh` runs it. The
file has no vocabulary of its own, which a draft that reads the target's hidden states does not need. The target is a
GGUF file as well, which llama.cpp's convert_hf_to_gguf.py writes.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from headstart.heads.base import Head
from headstart.heads.checkpoints.geometry import are_integers, rope_parameters
from headstart.heads.checkpoints.head_files import Contents
from headstart.heads.checkpoints.tensor_map import some
from headstart.heads.families import FAMILIES
from headstart.heads.families.eagle_files import LAYER_IDS
from headstart.heads.formats.eagle_rules import (
    Eagle3Layout,
    check_draft_map,
    check_layer,
    check_lm_head,
    check_own_embeddings,
    check_reach,
    fc_norm_of,
    file_layers,
)
from headstart.heads.formats.format import Format, Launch, Rules
from headstart.heads.formats.gguf_file import GGUF, ROPES, write_gguf
from headstart.heads.formats.handling import LOADS, REFUSES, WRONG, Case
from headstart.heads.repository import is_repository

VERSION = "llama.cpp 0c1e570"
#: field of config.json that names the GGUF file
FILE_FIELD = "gguf_file"
#: the form of EAGLE-3.1's norms that its graph reads, as settings of a recipe, and the remedy where a head has another
ONE_NORM: dict[str, Any] = {"head.fc_norm": "concat", "head.norm_output": False}
REMEDY = "train with head.fc_norm=concat head.norm_output=false"
#: types of targets whose graph gives the inputs of its layers (`layer_inp` in src/models/); with others it aborts
TARGETS = frozenset(
    (
        "deepseek_v4", "gemma3n_text", "gemma4_text", "gpt_oss", "lfm2", "lfm2_moe", "llama", "mimo_v2_flash",
        "minimax", "minimax_m2", "mistral", "mixtral", "nemotron_h", "qwen3", "qwen3_5_moe_text", "qwen3_5_text",
        "qwen3_moe", "qwen3_next",
    )
)  # fmt: skip


def _eagle3(case: Case) -> None:
    config, name = case.config, case.config.get(FILE_FIELD)
    place = case.raw.directory
    if name != GGUF or (place.is_dir() and not (place / GGUF).is_file()):
        how = "export.engines=[llama_cpp] writes one"
        if fc_norm_of(config) == "stream" or config.get("norm_output"):
            how = f"its graph lacks the head's norms: {REMEDY}"
        case.refuse(f"reads GGUF, and there is no {GGUF}: {how}")
        return
    layers = file_layers(case.names)
    sizes = check_layer(case, config, WRONG, layers)
    if layers != 1:
        case.refuse(f"{layers} layers: its EAGLE-3 graph has one")
    fc_norm = fc_norm_of(config)
    layout = Eagle3Layout(1, "input_layernorm", False, fc_norm)
    case.match(layout.tensors(REFUSES), sizes)
    if fc_norm == "stream":
        case.refuse(f"fc_norm: it has one norm over all streams, not one for each: {REMEDY}")
    known = {rule.name for rule in layout.tensors(REFUSES)} | {"embed_tokens.weight", "lm_head.weight", "d2t", "t2d"}
    if odd := [extra for extra in case.unexplained(known) if not extra.endswith(".bias") or case.nonzero(extra)]:
        case.refuse(f"{some(odd)}: its EAGLE-3 graph reads no such tensor")
    if (rope := rope_parameters(config, "config.json"))["rope_type"] not in ROPES:
        case.refuse(f"rope_type is {rope['rope_type']!r}, expected one of {', '.join(ROPES)}")
    if config.get("norm_output"):
        case.misread("norm_output: the un-normed state goes into the next step: train with head.norm_output=false")
    check_lm_head(case, sizes, LOADS if sizes["U"] == sizes["V"] else WRONG, "the target's is taken")
    check_draft_map(case, sizes)
    check_own_embeddings(case, sizes)
    ids = config.get(LAYER_IDS)
    if not are_integers(ids) or len(ids) != 3:
        case.refuse(f"feature layers {ids!r}: three are needed")
    else:
        check_reach(case, ids)


def _write(head: Head, provenance: dict[str, Any]) -> Contents:
    """The portable files; config.json also names the GGUF file, which `write_gguf` makes of them."""
    held = FAMILIES[head.family].files.portable(head)
    return Contents("gguf", {**held.config, FILE_FIELD: GGUF}, held.tensors)


def _launch(launch: Launch) -> str:
    target = f"{Path(launch.target).name}.gguf"
    words = ["llama-server", "-m", target, "-md", f"{launch.head}/{GGUF}", "--spec-type", "draft-eagle3"]
    words += ["--spec-draft-n-max", str(launch.tokens), *launch.limit("-c")]
    on_hub = is_repository(launch.target) and not Path(launch.target).is_dir()
    remote = ["--remote"] if on_hub else []  # else it takes the name for a directory
    convert = shlex.join(["python", "convert_hf_to_gguf.py", *remote, launch.target, "--outfile", target])
    return f"# the target as GGUF: {convert}\n{shlex.join(words)}"


FORMAT = Format(
    key="llama_cpp",
    name="llama.cpp",
    title="llama.cpp (llama-server)",
    version=VERSION,
    serves={"eagle3": Rules(_eagle3, _write, shards=True, convert=write_gguf)},
    launch=_launch,
    before=Case.require_parsed,
    targets=TARGETS,
    unchecked=("dflash", "dspark", "jetspec", "dflash2", "draft_model"),
)
