"""Hydra's files: Headstart's own are read back, the authors' are recognised and refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from format_layouts import DIMS, our_head, same_state
from torch import Tensor

from headstart.heads.errors import FormatError
from headstart.heads.families import HydraConfig
from headstart.heads.formats import check_directory, load_head, save_head


def test_the_factor_on_embeddings_is_saved(tmp_path: Path) -> None:
    head = our_head(HydraConfig(depth=2, prefix_layer=True, num_layers=2, lm_head="lowrank", rank=3))
    head.embed_scale.fill_(16.0)  # type: ignore[operator, union-attr]
    save_head(head, tmp_path, {}, dtype=torch.bfloat16)
    again = load_head(tmp_path, DIMS)
    assert again.embed_scale == 16.0 and set(again.state_dict()) == set(head.state_dict())
    save_head(head, tmp_path, {})
    assert same_state(load_head(tmp_path, DIMS), head)
    report = check_directory(tmp_path, DIMS)
    assert report.family == "hydra" and report.served == [] and report.loads("headstart")


def authors_tensors() -> dict[str, Tensor]:
    """Some tensors of a file that hydra/train/train.py saves (one head of one block; --hydra_head_arch prefix-mlp)."""
    size, vocab = DIMS.hidden_size, DIMS.vocab_size
    shapes = {
        "input_embed_fn.weight": (vocab, size),
        "prefix_embeding_layer.norm.weight": (size,),
        "prefix_embeding_layer.layers.0.input_layernorm.weight": (size,),
        "hydra_mlp.0.1.linear.weight": (size, 2 * size),
        "hydra_mlp.0.1.res_connection.weight": (size, 2 * size),
        "hydra_lm_head.0.1.weight": (vocab, size),
        "hydra_lm_head.0.1.bias": (vocab,),
    }
    return {name: torch.zeros(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("config", [{"hydra_num_heads": 1, "hydra_head_arch": "prefix-mlp"}, {}])
def test_the_authors_heads_are_refused_for_their_biases(tmp_path: Path, config: dict[str, object]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.save(authors_tensors(), tmp_path / "hydra_lm_head.pt")
    with pytest.raises(FormatError, match=r"Its output matrices have biases, which Headstart's Hydra heads lack"):
        load_head(tmp_path, DIMS)
