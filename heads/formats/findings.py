"""Verdicts on a checkpoint directory, and what the engines' validators share: a tolerant view of the directory.

Unlike the readers, a validator never stops at the first fault: it says what an engine does with each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch

from headstart.heads.checkpoints.geometry import integer, rope_parameters
from headstart.heads.checkpoints.raw import RawCheckpoint
from headstart.heads.dims import HeadDims
from headstart.heads.errors import FormatError, clip
from headstart.heads.families.eagle_files import LLAMA_DEFAULTS, is_eagle3, unnest
from headstart.heads.families.medusa.files import MEDUSA_KEYS, is_medusa
from headstart.heads.formats.recognise import is_dflash
from headstart.heads.rope import dynamic_note, positions_with_one_rope, same_rope


class Verdict(StrEnum):
    """What an engine does with a directory."""

    LOADS = "loads"
    WRONG = "loads wrongly"
    REFUSES = "refuses"
    UNKNOWN = "not known"


@dataclass
class EngineVerdict:
    """One engine's verdict with every reason found.

    Attributes:
        wrong: why it would draft something else than was trained, without saying so.
        refused: why it stops with an error.
        unknown: why nothing can be said.
        notes: what a user should know although it loads.
    """

    engine: str
    wrong: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> Verdict:
        """A refusal protects from loading wrongly, so it comes first."""
        if self.refused or self.wrong:
            return Verdict.REFUSES if self.refused else Verdict.WRONG
        return Verdict.UNKNOWN if self.unknown else Verdict.LOADS

    @property
    def reasons(self) -> list[str]:
        return [*self.refused, *self.wrong, *self.unknown]

    def add(self, verdict: Verdict, reason: str) -> None:
        lists = {Verdict.LOADS: self.notes, Verdict.WRONG: self.wrong, Verdict.UNKNOWN: self.unknown}
        lists.get(verdict, self.refused).append(clip(reason))


@dataclass(frozen=True)
class Row:
    """One line of an engine's table: a tensor, its shape in symbols, and what the engine does when it is missing."""

    name: str
    shape: tuple[str, ...]
    missing: Verdict
    why: str = ""


@dataclass
class View:
    """A directory as a validator sees it.

    Attributes:
        family: medusa, eagle, eagle3, dflash, draft_model (an ordinary language model), or None.
        config: the flat config (nested EAGLE configs unfolded).
        names: portable tensor name → file tensor name.
        strangers: file tensors of no known spelling.
    """

    raw: RawCheckpoint
    family: str | None
    config: dict[str, Any]
    names: dict[str, str]
    strangers: list[str]

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self.raw.tensors[self.names[name]].shape if name in self.names else None

    def nonzero(self, name: str) -> bool:
        """Whether the tensor is in the file and not all zero."""
        return name in self.names and bool(self.raw.read(self.names[name]).any())


def doubled_names(raw: RawCheckpoint) -> list[str]:
    """Tensors that a file holds with and without `model.`: which of the two counts depends on the engine's order."""
    return sorted(name for name in raw.tensors if f"model.{name}" in raw.tensors)


def view(raw: RawCheckpoint) -> View:
    """Recognise the family by its tensors and give the tensors portable names."""
    short = {name.removeprefix("model."): name for name in raw.tensors}
    if is_dflash(raw):
        return View(raw, "dflash", raw.config, dict(short), [])
    if is_language_model(short):
        return View(raw, "draft_model", raw.config, dict(short), [])
    if is_medusa(raw) or not any(
        name == "fc.weight" or "mlp." in name or name.startswith("fusion_fc") for name in short
    ):
        names, strangers = _medusa_view(raw)
        return View(raw, "medusa" if names or is_medusa(raw) else None, raw.config, names, strangers)
    config = unnest(raw.config)
    if is_eagle3(short):
        return View(raw, "eagle3", config, {_midlayer(name): full for name, full in short.items()}, [])
    return View(raw, "eagle", config, dict(short), [])


def is_language_model(short: Iterable[str]) -> bool:
    """Whether tensor names (without `model.`) are an ordinary causal language model's."""
    names = set(short)
    return "embed_tokens.weight" in names and "layers.0.input_layernorm.weight" in names and "fc.weight" not in names


def _midlayer(name: str) -> str:
    return "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name


def _medusa_view(raw: RawCheckpoint) -> tuple[dict[str, str], list[str]]:
    names, strangers = {}, []
    for name in raw.tensors:
        short = name.removeprefix("medusa_heads.").removeprefix("medusa_head.")
        for pattern, ours in MEDUSA_KEYS:
            if match := pattern.fullmatch(short):
                names[ours.format(*match.groups())] = name
                break
        else:
            strangers.append(name)
    return names, strangers


def match_rows(
    found: EngineVerdict, seen: View, rows: Iterable[Row], sizes: dict[str, int], mismatch: Verdict = Verdict.REFUSES
) -> None:
    """Compare the file with an engine's table."""
    for row in rows:
        shape = seen.shape(row.name)
        expected = tuple(sizes[symbol] for symbol in row.shape)
        if shape is None:
            silent = "the engine keeps uninitialised memory in its place; copy or export the head again"
            reason = row.why or ("the engine stops" if row.missing is Verdict.REFUSES else silent)
            found.add(row.missing, f"{row.name} {list(expected)} is missing: {reason}")
        elif shape != expected:
            symbols = " × ".join(row.shape)
            turned = ": it is transposed" if shape == expected[::-1] else ""
            found.add(
                mismatch,
                f"{seen.names[row.name]} is {list(shape)}, config.json makes it {list(expected)} ({symbols}){turned}",
            )
        elif not seen.raw.tensors[seen.names[row.name]].dtype.is_floating_point:
            dtype = seen.raw.tensors[seen.names[row.name]].dtype
            found.add(Verdict.WRONG, f"{seen.names[row.name]} is {dtype}: it would be cast in silence")


def llama_sizes(config: dict[str, Any], where: str) -> dict[str, int]:
    """Symbol → size as an engine computes them from a llama config, transformers' defaults included.

    H draft width, D target width, A query rows, G key/value rows, I MLP width, V target and U draft vocabulary.
    Raises: FormatError for a value that is no size.
    """
    full = {**LLAMA_DEFAULTS, **{key: value for key, value in config.items() if value is not None}}
    hidden, heads = integer(full, "hidden_size", where), integer(full, "num_attention_heads", where)
    kv_heads = integer(full, "num_key_value_heads", where, default=heads)
    head_dim = integer(full, "head_dim", where, default=max(hidden // heads, 1))
    width = integer(full, "target_hidden_size", where, default=hidden)
    vocab = integer(full, "vocab_size", where)
    return {
        "H": hidden,
        "2H": 2 * hidden,
        "D": width,
        "3D": 3 * width,
        "A": heads * head_dim,
        "G": kv_heads * head_dim,
        "I": integer(full, "intermediate_size", where),
        "V": vocab,
        "U": integer(full, "draft_vocab_size", where, default=vocab),
        "layers": integer(full, "num_hidden_layers", where),
    }


def layer_rows(prefix: str, width: str, missing: Verdict) -> list[Row]:
    """Rows of one llama draft layer whose attention input is `width` wide."""
    return [
        Row(f"{prefix}self_attn.q_proj.weight", ("A", width), missing),
        Row(f"{prefix}self_attn.k_proj.weight", ("G", width), missing),
        Row(f"{prefix}self_attn.v_proj.weight", ("G", width), missing),
        Row(f"{prefix}self_attn.o_proj.weight", ("H", "A"), missing),
        Row(f"{prefix}mlp.gate_proj.weight", ("I", "H"), missing),
        Row(f"{prefix}mlp.up_proj.weight", ("I", "H"), missing),
        Row(f"{prefix}mlp.down_proj.weight", ("H", "I"), missing),
        Row(f"{prefix}post_attention_layernorm.weight", ("H",), missing, "the norm stays at ones"),
    ]


EAGLE3_NORMS = ("midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight", "norm.weight")


def eagle3_rows(missing: Verdict) -> list[Row]:
    """Rows of an EAGLE-3 head that engines do not share from the target; lm_head and d2t have rules of their own."""
    norms = [Row(name, ("H",), missing, "the norm stays at ones") for name in EAGLE3_NORMS]
    return [Row("fc.weight", ("H", "3D"), missing), *layer_rows("midlayer.", "2H", missing), *norms]


def eagle_rows(missing: Verdict) -> list[Row]:
    """Rows of an EAGLE-1 head."""
    return [Row("fc.weight", ("H", "2H"), missing), *layer_rows("layers.0.", "H", missing)]


def eagle_config_of(config: dict[str, Any]) -> dict[str, Any]:
    """The nested `eagle_config`, empty where it is missing or no object."""
    nested = config.get("eagle_config")
    return nested if isinstance(nested, dict) else {}


def draft_map_problem(seen: View, size: int, vocab: int) -> str | None:
    """What is wrong with the values of d2t and t2d, or None."""
    if "d2t" not in seen.names:
        return None
    offsets = seen.raw.read(seen.names["d2t"])
    if offsets.dtype not in (torch.int64, torch.int32):
        return f"d2t is {offsets.dtype}, expected int64 offsets"
    if tuple(offsets.shape) != (size,):
        return f"d2t has shape {list(offsets.shape)}, expected [{size}]"
    ids = offsets.long() + torch.arange(size)
    if int(ids.min()) < 0 or int(ids.max()) >= vocab or not bool((ids[1:] > ids[:-1]).all()):
        return f"d2t + index is no ascending list of ids below {vocab}: it must hold offsets (target id - draft id)"
    if "t2d" in seen.names:
        mask = seen.raw.read(seen.names["t2d"])
        if tuple(mask.shape) != (vocab,) or not torch.equal(torch.nonzero(mask).squeeze(1), ids):
            return "t2d does not mark the ids that d2t lists"
    return None


def rope_problems(config: dict[str, Any], where: str, target: HeadDims | None) -> list[str]:
    """Why the draft layer would turn differently than the target: every engine reads rope from the draft's config."""
    try:
        rope = rope_parameters(config, where)
    except FormatError as error:
        return [str(error)]
    if target is None or same_rope(rope, target.rope_parameters):
        return []
    return [
        f"rope {rope} differs from the target's {target.rope_parameters}: write the target's, unless the head was "
        "trained with another"
    ]


def geometry_notes(config: dict[str, Any], target: HeadDims | None) -> list[str]:
    """What changes a draft layer's output but neither its shapes nor any engine's mind.

    Sizes that are not the target's: a head may have been trained so; a config edited by hand looks the same. LongRoPE,
    by whose long factors an engine turns where it is launched with a longer context.
    """
    notes = one_rope_note(config)
    if target is None:
        return notes
    heads = config.get("num_attention_heads") or LLAMA_DEFAULTS["num_attention_heads"]
    hidden = config.get("hidden_size") or LLAMA_DEFAULTS["hidden_size"]
    size = config.get("head_dim") or hidden // max(heads, 1)
    epsilon = config.get("rms_norm_eps") or LLAMA_DEFAULTS["rms_norm_eps"]
    if hidden == target.hidden_size and (heads, size) != (target.num_heads, target.head_dim):
        notes.append(
            f"{heads} attention heads of {size} where the target has {target.num_heads} of {target.head_dim}: right "
            "only if the head was trained so"
        )
    known = target.rms_norm_eps
    if not isinstance(epsilon, int | float) or not known * 0.999 <= epsilon <= known * 1.001:
        notes.append(
            f"rms_norm_eps is {epsilon!r} where the target has {known!r}: right only if the head was trained so"
        )
    longest = config.get("max_position_embeddings")
    if type(longest) is int and longest < target.max_position_embeddings:
        notes.append(
            f"max_position_embeddings is {longest}, the target's {target.max_position_embeddings}: engines that go by "
            "it draft nothing for longer texts"
        )
    return notes


def one_rope_note(config: dict[str, Any]) -> list[str]:
    """That a head with LongRoPE is served within its original length only, and what engines make of a dynamic rope."""
    try:
        rope = rope_parameters(config, "config.json")
    except FormatError:
        return []
    limit = positions_with_one_rope(rope)
    if limit is None:
        return [note] if (note := dynamic_note(rope)) else []
    return [
        f"LongRoPE: launch the engine with a context of at most {limit} tokens (vLLM: --max-model-len {limit}); with a "
        "longer one it turns every position, of the target too, by the long factors, which this head never saw"
    ]


#: config fields that transformers parses before an engine sees them, and what each has to be
PARSED: dict[str, tuple[type, str]] = {
    "eagle_config": (dict, "an object"),
    "dflash_config": (dict, "an object"),
    "architectures": (list, "a list of names"),
    "max_position_embeddings": (int, "an integer"),
    "hidden_act": (str, "the name of an activation"),
}


def parse_problems(config: dict[str, Any]) -> list[str]:
    """Why transformers, which every engine asks first, makes no configuration out of a config.json."""
    kind, problems = config.get("model_type"), []
    if not (isinstance(kind, str) and kind) and "speculators_model_type" not in config:
        problems.append(f"model_type is {kind!r}, expected the name of an architecture such as 'llama'")
    for name, (wanted, words) in PARSED.items():
        value = config.get(name)
        parts = value if isinstance(value, list) else []
        if value is None or (type(value) is wanted and all(isinstance(part, str) for part in parts)):
            continue
        problems.append(f"{name} is {value!r}, expected {words}")
    return problems


def mask_token_problem(name: str, token: Any, vocab: int) -> str | None:
    """What is wrong with the token that stands for places still to be drafted, or None."""
    if type(token) is int and 0 <= token < vocab:
        return None
    return f"{name} is {token!r}, expected the token that stands for what is to be drafted: an id below {vocab}"


def guarded(found: EngineVerdict, check: Callable[[], None]) -> EngineVerdict:
    """Run a check; what it cannot even read, the engine cannot either."""
    try:
        check()
    except FormatError as error:
        found.add(Verdict.REFUSES, str(error))
    return found
