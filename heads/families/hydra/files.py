"""Hydra on disk. No engine serves it: heads are saved in the compact form, which Headstart alone reads."""

from __future__ import annotations

from headstart.heads.checkpoints.head_files import HeadFiles
from headstart.heads.checkpoints.raw import RawCheckpoint
from headstart.heads.checkpoints.tensor_map import TensorMap
from headstart.heads.dims import HeadDims
from headstart.heads.errors import FormatError
from headstart.heads.families.paper import Paper

PAPER = Paper(
    method="Hydra",
    title="Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding",
    authors="Ankner, Zachary and Parthasarathy, Rishab and Nrusimha, Aniruddha and Rinard, Christopher and "
    "Ragan-Kelley, Jonathan and Brandon, William",
    arxiv="2402.05109",
)
#: what the authors' code names its tensors
AUTHORS_TENSORS = ("hydra_mlp.", "hydra_lm_head.", "prefix_embeding_layer.")


class HydraFiles(HeadFiles):
    """The authors' own files are recognised, and refused: their output matrices have trained biases, ours have none."""

    facts = {
        "feature": "last hidden state after the final norm",
        "block": "R x + SiLU(L x) over [f_t ; e(x_{t+1}) ; … ; e(x_{t+d})]",
        "method": f"{PAPER.method}, arXiv {PAPER.arxiv}",
    }

    def recognise(self, raw: RawCheckpoint) -> bool:
        return "hydra_num_heads" in raw.config or any(name.startswith(AUTHORS_TENSORS) for name in raw.tensors)

    def read(self, raw: RawCheckpoint, target: HeadDims | None) -> TensorMap:
        raise FormatError(
            f"{raw.directory}: a Hydra head of the authors' code (github.com/zankner/Hydra). Its output matrices have "
            "biases, which Headstart's Hydra heads lack: it would draft other tokens than it was trained for. Train "
            "one with the recipes *-hydra and *-hydrapp"
        )
