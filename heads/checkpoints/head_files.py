"""How the heads of one family look on disk: `HeadFiles`, of which each family has a subclass in its `files.py`.

The defaults are right for a family that no serving engine knows: its heads are saved under their own tensor names, in
the *compact* form, which only Headstart reads. A family that engines serve adds a portable form, and the layouts in
which others publish its heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from headstart.heads.base import Head, HeadConfig
from headstart.heads.checkpoints.raw import RawCheckpoint
from headstart.heads.checkpoints.tensor_map import TensorMap
from headstart.heads.dims import HeadDims

WEIGHTS = "model.safetensors"
#: files beside the weights that change what a published head computes; Headstart refuses such a head, by their presence
BESIDE = ("mask_embedding.pt",)
#: layout of a directory that only Headstart reads
COMPACT = "compact"


@dataclass(frozen=True)
class Contents:
    """What a directory holds besides headstart.json.

    Attributes:
        layout: its name in headstart.json.
        config: config.json, without the dtype.
        weights: name of the file of the tensors.
        settings: the config of the head in the file, if it differs from the head's own (matrices were merged, or it is
            written as a head of another family that computes the same).
    """

    layout: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    weights: str = WEIGHTS
    settings: HeadConfig | None = None

    def cast(self, dtype: torch.dtype | None) -> dict[str, Tensor]:
        """The tensors, floating ones in `dtype`."""
        if dtype is None:
            return self.tensors
        return {name: t.to(dtype) if t.dtype.is_floating_point else t for name, t in self.tensors.items()}


@dataclass
class Spelling:
    """A checkpoint's tensors under the names of the portable form.

    Attributes:
        config: config.json with nested parts unfolded.
        names: portable tensor name → name in the file.
        strangers: tensors of the file that no known spelling explains.
    """

    config: dict[str, Any]
    names: dict[str, str]
    strangers: list[str]


class HeadFiles:
    """What Headstart knows about one family's files.

    Attributes:
        facts: what headstart.json and the model card say about every head of the family.
        layouts: names of the foreign layouts that `read` understands, for error messages.
        speculators: the family's name in a config of the speculators library; None where that has no such heads.
        has_rope: whether the head turns positions by the rope of its dimensions, as a llama draft layer does.
        compact_note: what a compact config.json says to its reader.
        zero_at_start: prefix of portable tensor names → what a matrix of zeros means, where training starts with zeros.
    """

    facts: ClassVar[dict[str, str]] = {}
    layouts: ClassVar[tuple[str, ...]] = ()
    speculators: ClassVar[str | None] = None
    has_rope: ClassVar[bool] = False
    compact_note: ClassVar[str] = "Only Headstart reads this head: no serving engine knows its family."
    zero_at_start: ClassVar[dict[str, str]] = {}

    def facts_of(self, config: HeadConfig) -> dict[str, str]:
        """`facts` of a head with this config."""
        return self.facts

    # reading

    def recognise(self, raw: RawCheckpoint) -> bool:
        """Whether a foreign checkpoint is meant to be a head of this family, even if it is damaged."""
        return False

    def read(self, raw: RawCheckpoint, target: HeadDims | None) -> TensorMap:
        """How a recognised checkpoint becomes a head. Every tensor is mapped, or listed as unused with the reason.

        Args:
            target: the target's dimensions; sizes are compared with them.
        Raises: FormatError naming the file, the field or tensor, and the remedy.
        """
        raise NotImplementedError

    def spell(self, raw: RawCheckpoint) -> Spelling:
        """The tensors under portable names. Nothing is refused here: engines' rules look at damaged files, too."""
        return Spelling(raw.config, {name: name for name in raw.tensors}, [])

    # comparing config.json with headstart.json

    def settings(self, config: HeadConfig, dims: HeadDims) -> dict[str, Any]:
        """Settings of a head with this config and these dimensions, which `stated` must equal."""
        return asdict(config)

    def stated(self, mapped: TensorMap) -> dict[str, Any]:
        """Settings as config.json and the tensors have them, by the names of `settings`."""
        return dict(mapped.fields)

    def differences(self, mapped: TensorMap, config: HeadConfig, dims: HeadDims) -> Iterator[tuple[str, Any, Any]]:
        """Fields in which headstart.json and the files disagree: (name, in headstart.json, in the files)."""
        settings = self.settings(config, dims)
        for name, value in self.stated(mapped).items():
            if settings.get(name) != value:
                yield name, settings.get(name), value

    # writing

    def tensors(self, head: Head) -> dict[str, Tensor]:
        """The head's own tensors under portable names."""
        return {name: tensor.detach() for name, tensor in head.state_dict().items()}

    def config_json(self, head: Head) -> dict[str, Any]:
        """config.json of the portable form, without the dtype; {} for a family that has none."""
        return {}

    def contents(self, head: Head) -> Contents:
        """What `save_head` writes. Here the compact form: the state dict as it is."""
        config = {
            "architectures": [compact_architecture(head.family)],
            "model_type": f"headstart_{head.family}",
            "hidden_size": head.dims.hidden_size,
            "vocab_size": head.dims.vocab_size,
            "note": self.compact_note,
        }
        return Contents(COMPACT, config, HeadFiles.tensors(self, head))

    def portable(self, head: Head) -> Contents:
        """What `export` writes for all engines that take one form; for a family that no engine serves, what is saved.

        Raises: FormatError for a head that is not bound to the target whose matrices the form needs.
        """
        return self.contents(head)

    # serving

    def drafted_tokens(self, depth: int, chain: int | None) -> int:
        """Tokens that an engine is asked to draft.

        Args:
            depth: draft depths that were trained.
            chain: the best length that `headstart tune` measured; None without a tuning.
        """
        return min(4 if chain is None else chain, depth)


def compact_architecture(family: str) -> str:
    """What config.json of the compact form names; engines refuse it."""
    return f"Headstart{family.capitalize()}Model"
