"""Medusa on disk: tensor names of vLLM, of FasterDecoding (used by TGI as well), and of TGI's v2 (methods §1)."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from headstart.heads.base import Head
from headstart.heads.checkpoints.geometry import flag, integer
from headstart.heads.checkpoints.head_files import Contents, HeadFiles, Spelling
from headstart.heads.checkpoints.raw import RawCheckpoint
from headstart.heads.checkpoints.tensor_map import TensorMap, require_equal, require_names, some
from headstart.heads.dims import HeadDims
from headstart.heads.errors import FormatError
from headstart.heads.families.medusa.head import MedusaConfig, MedusaHead
from headstart.heads.families.paper import Paper

PAPER = Paper(
    method="Medusa-1",
    title="Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads",
    authors="Cai, Tianle and Li, Yuhong and Geng, Zhengyang and Peng, Hongwu and Lee, Jason D. and Chen, Deming and "
    "Dao, Tri",
    arxiv="2401.10774",
)
#: fewest and most heads that a file may have, and blocks of a head
COUNTS = (1, 64)
#: spelling in a file → portable name
SPELLINGS = (
    (re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)"), "blocks.{0}.layers.{1}.{2}"),
    (re.compile(r"lm_heads\.(\d+)\.(weight)"), "lm_heads.{0}.{1}"),
    (re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)"), "blocks.{0}.layers.{1}.{2}"),
    (re.compile(r"(\d+)\.(\d+)\.(weight)"), "lm_heads.{0}.{2}"),
)


class MedusaFiles(HeadFiles):
    """A head without output matrices of its own is saved without any; `portable` adds those that engines need."""

    facts = {
        "feature": "last hidden state after the final norm",
        "block": "h + SiLU(W h + b)",
        "method": f"{PAPER.method}, arXiv {PAPER.arxiv}",
    }
    layouts = ("Medusa v1/v2",)
    compact_note = "Saved without the target's lm_head: run `headstart export` before serving."
    zero_at_start = {
        "blocks.": "every value is zero, as before training: this head repeats what the target's own lm_head says",
        "up.": "every value is zero, as before training: this head has no output matrix of its own",
    }

    def recognise(self, raw: RawCheckpoint) -> bool:
        spelling = self.spell(raw)
        return named(raw.config) or bool(spelling.names and not spelling.strangers)

    def spell(self, raw: RawCheckpoint) -> Spelling:
        portable = {name: portable_name(name) for name in raw.tensors}
        names = {ours: name for name, ours in portable.items() if ours is not None}
        return Spelling(raw.config, names, [name for name, ours in portable.items() if ours is None])

    def read(self, raw: RawCheckpoint, target: HeadDims | None) -> TensorMap:
        """Heads are counted by the tensors, as some published configs name fewer heads than their file has."""
        config, where = raw.config, str(raw.directory / "config.json")
        if not named(config):
            raise FormatError(
                f"{where}: does not say that this is a Medusa head, which the tensors are; expected model_type "
                "'medusa', architectures ['MedusaModel'] or medusa_num_heads"
            )
        names = self._names(raw)
        heads = len({name.split(".")[1] for name in names if name.startswith("blocks.")})
        layers = len({name.split(".")[3] for name in names if name.startswith("blocks.0.")})
        if not heads or not layers:
            raise FormatError(f"{raw.directory}: no Medusa residual blocks among {some(raw.tensors)}")
        dims, own = self._sizes(raw, names, target, where)
        blocks = [f"blocks.{i}.layers.{j}" for i in range(heads) for j in range(layers)]
        biases = {f"{block}.bias" for block in blocks}
        has_bias = any(name.endswith(".bias") for name in names)
        expected = {f"{block}.weight" for block in blocks} | (biases if has_bias else set())
        unused: dict[str, str] = {}
        if own:
            expected |= {f"lm_heads.{i}.weight" for i in range(heads)}
        elif "lm_heads.0.weight" in names:
            unused[names.pop("lm_heads.0.weight")] = "the target's lm_head, shared by all heads"
        require_names(raw, set(names), expected)
        fields = {"depth": heads, "num_layers": layers, "lm_head": "own" if own else "shared"}
        zeros = () if has_bias else tuple(sorted(biases))
        return TensorMap("Medusa", "medusa", fields, dims, names, zeros, unused=unused)

    def _names(self, raw: RawCheckpoint) -> dict[str, str]:
        """As `spell`. Raises: FormatError for tensors of unknown names, and where two names mean one tensor."""
        spelling = self.spell(raw)
        if spelling.strangers:
            raise FormatError(
                f"{raw.directory}: tensors {some(spelling.strangers)} belong to no Medusa head that Headstart knows; "
                "it would be read in part"
            )
        if twice := set(raw.tensors) - set(spelling.names.values()):
            name = min(twice)
            ours = portable_name(name) or ""
            raise FormatError(
                f"{raw.directory}: {name} and {spelling.names[ours]} are the same tensor ({ours}); keep one"
            )
        return spelling.names

    def _sizes(
        self, raw: RawCheckpoint, names: dict[str, str], target: HeadDims | None, where: str
    ) -> tuple[HeadDims, bool]:
        """The target's dimensions, and whether every head has its own output matrix."""
        config = raw.config
        first = raw.tensors[names.get("blocks.0.layers.0.weight", next(iter(names.values())))]
        hidden = integer(config, "hidden_size", where, default=first.shape[-1])
        matrices = sorted(name for name in names if name.startswith("lm_heads."))
        original = flag(config, "original_lm_head", where, False)
        if original and matrices != ["lm_heads.0.weight"]:
            raise FormatError(
                f"{where}: original_lm_head is true, so exactly lm_heads.0.weight is expected; found {matrices}"
            )
        rows = raw.tensors[names[matrices[0]]].shape[0] if matrices else (target.vocab_size if target else None)
        vocab = integer(config, "vocab_size", where, default=rows)
        if config.get("truncated_vocab_size") not in (None, vocab):
            raise FormatError(
                f"{where}: truncated_vocab_size is {config['truncated_vocab_size']!r}: reduced Medusa vocabularies "
                "are not read"
            )
        if config.get("logit_scale", 1.0) != 1.0:
            raise FormatError(f"{where}: logit_scale is {config['logit_scale']!r}, expected 1")
        dims = target or HeadDims(hidden, vocab, 1, 1, 1, hidden, hidden)
        require_equal(where, "hidden_size", hidden, dims.hidden_size)
        require_equal(where, "vocab_size", vocab, dims.vocab_size)
        return dims, bool(matrices) and not original

    def config_json(self, head: Head) -> dict[str, Any]:
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": head.dims.hidden_size,
            "vocab_size": head.dims.vocab_size,
            "num_heads": head.depth,
            "num_hidden_layers": config_of(head).num_layers,
            "medusa_fc_bias": True,
        }

    def contents(self, head: Head) -> Contents:
        return self.portable(head) if config_of(head).lm_head == "own" else super().contents(head)

    def portable(self, head: Head) -> Contents:
        """The files with output matrices, which vLLM cannot take from the target.

        A shared lm_head is written once (`original_lm_head`), a low-rank one is merged into one matrix per head.
        Raises: FormatError when such a head is not bound to its target.
        """
        config, lm_head = self.config_json(head), config_of(head).lm_head
        if lm_head == "own":
            return Contents("portable", config, self.tensors(head))
        tensors, settings = merged_tensors(head), own_matrices(head)
        if lm_head == "shared":
            settings = config_of(head)
            config |= {"original_lm_head": True, "truncated_vocab_size": head.dims.vocab_size}
            tensors = {n: t for n, t in tensors.items() if not n.startswith("lm_heads.") or n == "lm_heads.0.weight"}
        return Contents("portable", config, tensors, settings=settings)


def named(config: dict[str, Any]) -> bool:
    """Whether config.json says that it is a Medusa head's."""
    architectures = config.get("architectures")
    by_architecture = isinstance(architectures, list) and "MedusaModel" in architectures
    return config.get("model_type") == "medusa" or "medusa_num_heads" in config or by_architecture


def portable_name(name: str) -> str | None:
    """Portable name of a tensor in any Medusa spelling; None for one of no known spelling."""
    short = name.removeprefix("medusa_heads.").removeprefix("medusa_head.")
    for pattern, ours in SPELLINGS:
        if match := pattern.fullmatch(short):
            return ours.format(*match.groups())
    return None


def config_of(head: Head) -> MedusaConfig:
    return cast(MedusaConfig, head.config)


def own_matrices(head: Head) -> MedusaConfig:
    """The head's config once every head has its own output matrix."""
    return replace(config_of(head), lm_head="own")


def merged_tensors(head: Head) -> dict[str, Tensor]:
    """Portable tensors with one output matrix per head, also for a head that uses the target's lm_head.

    Raises: FormatError when it uses the target's lm_head and is not bound to the target.
    """
    medusa = cast(MedusaHead, head)
    if medusa.teacher is None and medusa.config.lm_head != "own":
        raise FormatError("this Medusa head shares the target's lm_head: bind it to the target before exporting")
    blocks = {name: t.detach() for name, t in head.state_dict().items() if name.startswith("blocks.")}
    with torch.no_grad():
        matrices = {f"lm_heads.{d}.weight": medusa.output_weight(d).detach() for d in range(head.depth)}
    return {**blocks, **matrices}
