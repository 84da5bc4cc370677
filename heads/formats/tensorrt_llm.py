"""TensorRT-LLM (read from its source): EAGLE-3 on the PyTorch backend, Medusa through the legacy converter.

EAGLE-3 takes the portable directory; Medusa takes TGI's v1 file (`medusa_lm_head.safetensors`).
"""

from __future__ import annotations

from typing import Any

from headstart.heads.base import Head
from headstart.heads.checkpoints.geometry import integer
from headstart.heads.dims import HeadDims
from headstart.heads.errors import FormatError
from headstart.heads.formats import portable, tgi
from headstart.heads.formats.findings import (
    EngineVerdict,
    Row,
    Verdict,
    View,
    draft_map_problem,
    eagle3_rows,
    eagle_config_of,
    geometry_notes,
    guarded,
    llama_sizes,
    match_rows,
    parse_problems,
    rope_problems,
)

ENGINE = "TensorRT-LLM"
WRONG, REFUSES, LOADS = Verdict.WRONG, Verdict.REFUSES, Verdict.LOADS


def check(seen: View, target: HeadDims | None) -> EngineVerdict:
    """Verdict of TensorRT-LLM on a directory."""
    found = EngineVerdict(ENGINE)
    if seen.family == "eagle3":
        return guarded(found, lambda: _eagle3(found, seen, target))
    if seen.family == "medusa":
        return guarded(found, lambda: _medusa(found, seen))
    if seen.family in ("dflash", "draft_model"):
        found.add(Verdict.UNKNOWN, f"what it does with a {seen.family} has not been checked")
        return found
    found.add(REFUSES, "its PyTorch backend serves EAGLE-3 only, its legacy converter Medusa")
    return found


def _eagle3(found: EngineVerdict, seen: View, target: HeadDims | None) -> None:
    config = seen.config
    sizes = llama_sizes(config, "config.json")
    match_rows(found, seen, eagle3_rows(REFUSES), sizes)
    for problem in parse_problems(seen.raw.config):
        found.add(REFUSES, problem)
    nested = eagle_config_of(config)
    if config.get("norm_before_residual"):
        found.add(WRONG, "norm_before_residual is true: the residual is always the un-normed one")
    if config.get("norm_before_fc") and not nested.get("norm_before_fc"):
        found.add(WRONG, "norm_before_fc is read inside eagle_config only")
    if config.get("hidden_act", "silu") != "silu":
        found.add(WRONG, f"hidden_act is {config['hidden_act']!r}: its draft layer computes silu")
    if target is not None and sizes["D"] != target.hidden_size:
        found.add(REFUSES, f"reads hidden states of width {sizes['D']}, the target's are {target.hidden_size} wide")
    if target is not None and sizes["V"] != target.vocab_size:
        found.add(
            WRONG, f"vocab_size is {sizes['V']}, the target's {target.vocab_size}: the head belongs to another target"
        )
    if "mask_hidden" in seen.names:
        found.add(
            WRONG, "mask_hidden is not read: it drafts one token after the other, which P-EAGLE was not trained for"
        )
    for reason in rope_problems(config, "config.json", target):
        found.add(WRONG, reason)
    for note in geometry_notes(config, target):
        found.add(LOADS, note)
    if sizes["layers"] != 1:
        found.add(WRONG, f"num_hidden_layers is {sizes['layers']} and the file holds one layer")
    size, vocab = sizes["U"], sizes["V"]
    shape = seen.shape("lm_head.weight")
    if shape is None:
        found.add(LOADS if size == vocab else WRONG, "lm_head.weight is missing: the target's is taken")
    elif shape != (size, sizes["H"]):
        found.add(REFUSES, f"lm_head.weight is {list(shape)}, config.json makes it [{size}, {sizes['H']}]")
    if "d2t" not in seen.names and size < vocab:
        found.add(
            WRONG, f"d2t is missing with draft_vocab_size {size} < vocab_size {vocab}: draft ids pass as target ids"
        )
    elif problem := draft_map_problem(seen, size, vocab):
        found.add(WRONG, problem)
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    usual = [2, target.num_layers // 2, target.num_layers - 3] if target else None
    if isinstance(ids, list) and ids != usual:
        found.add(
            LOADS, f"set the captured layers in its speculative config to the head's: hidden_states indices {ids}"
        )


def _medusa(found: EngineVerdict, seen: View) -> None:
    weights = {tgi.WEIGHTS, "medusa_lm_head.pt"} & set(seen.raw.readers)
    if not weights:
        found.add(
            REFUSES, f"the converter reads {tgi.WEIGHTS}; the directory holds {', '.join(sorted(seen.raw.readers))}"
        )
    heads = integer(seen.config, "medusa_num_heads", "config.json", default=1)
    layers = integer(seen.config, "medusa_num_layers", "config.json", default=1)
    first, matrix = seen.shape("blocks.0.layers.0.weight") or (0, 0), seen.shape("lm_heads.0.weight") or (0, 0)
    rows = []
    for i in range(heads):
        rows += [
            Row(f"blocks.{i}.layers.{j}.weight", ("D", "D"), REFUSES, "the converter stops") for j in range(layers)
        ]
        rows += [Row(f"blocks.{i}.layers.{j}.bias", ("D",), REFUSES, "the converter stops") for j in range(layers)]
        rows.append(Row(f"lm_heads.{i}.weight", ("V", "D"), REFUSES, "the converter stops"))
    match_rows(found, seen, rows, {"D": first[-1], "V": matrix[0]})
    found.add(LOADS, "through the legacy converter (convert_checkpoint.py --medusa_model_dir)")


def contents(head: Head, provenance: dict[str, Any]) -> portable.Contents:
    """EAGLE-3: the portable directory; Medusa: TGI's v1 file. Raises: FormatError for EAGLE-1."""
    if head.family == "eagle3":
        return portable.contents(head)
    if head.family == "medusa":
        return tgi.contents(head, provenance, v1=True)
    raise FormatError(f"export.engines: TensorRT-LLM serves eagle3 and medusa, found {head.family}")
