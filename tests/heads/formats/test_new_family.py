"""A new family: its folder and one line in FAMILIES are enough to save, load, check and export its heads."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from format_layouts import DIMS, our_head, same_state
from torch import Tensor, nn

from headstart.heads.base import Head, HeadConfig, Loss
from headstart.heads.batch import FeatureBatch, FeatureSpec
from headstart.heads.checkpoints.head_files import Contents, HeadFiles
from headstart.heads.checkpoints.raw import RawCheckpoint
from headstart.heads.checkpoints.tensor_map import TensorMap, map_tensors
from headstart.heads.dims import HeadDims
from headstart.heads.errors import FormatError
from headstart.heads.families import FAMILIES, Family
from headstart.heads.families.paper import Paper
from headstart.heads.formats import ExportConfig, Handling, check_directory, export_head, load_head, save_head
from headstart.heads.formats.card import render_card
from headstart.heads.formats.engines import FORMATS
from headstart.heads.formats.format import Rules
from headstart.heads.formats.handling import Case

PAPER = Paper("Mixer", "Drafts by mixing", "Doe, Jane", "2501.00001")


@dataclass
class MixerConfig(HeadConfig):
    type: str = "mixer"
    width: int = 12


class MixerHead(Head):
    """Two layers of the target, mixed, and a draft vocabulary of 20 tokens."""

    family = "mixer"
    config: MixerConfig

    def __init__(self, config: MixerConfig, dims: HeadDims):
        super().__init__(config, dims)
        self.mix = nn.Linear(2 * dims.hidden_size, config.width)
        self.out = nn.Linear(config.width, 20, bias=False)
        self.register_buffer("draft_ids_U", torch.arange(20))

    @property
    def spec(self) -> FeatureSpec:
        return FeatureSpec((2, 5))

    def loss_counts(self, batch: FeatureBatch) -> Tensor:
        raise NotImplementedError

    def loss(self, batch: FeatureBatch, teacher: object, scale_T: Tensor | None = None) -> Loss:
        raise NotImplementedError


class PublishedMixerFiles(HeadFiles):
    """A form that others use as well: two matrices, and a config that counts the width."""

    facts = {"method": "Mixer"}
    layouts = ("Mixer",)

    def recognise(self, raw: RawCheckpoint) -> bool:
        return "mixer_width" in raw.config

    def read(self, raw: RawCheckpoint, target: HeadDims | None) -> TensorMap:
        names = {name: name for name in raw.tensors}
        ours = {name: name for name in ("mix.weight", "mix.bias", "out.weight")}
        fields, unused = {"width": raw.config["mixer_width"]}, {"draft_ids_U": "turned into the draft ids"}
        found = map_tensors(raw, "Mixer", "mixer", fields, target or DIMS, names, ours, unused)
        found.draft_ids_U = raw.read("draft_ids_U")
        return found

    def config_json(self, head: Head) -> dict[str, object]:
        return {"architectures": ["MixerModel"], "model_type": "mixer", "mixer_width": head.config.width}

    def contents(self, head: Head) -> Contents:
        return Contents("portable", self.config_json(head), self.tensors(head))


def register(monkeypatch: pytest.MonkeyPatch, files: HeadFiles) -> Head:
    monkeypatch.setitem(FAMILIES, "mixer", Family("mixer", PAPER, MixerConfig, MixerHead, files))
    return our_head(MixerConfig(depth=2))


def handlings(directory: Path) -> dict[str, Handling]:
    return {name: engine.handling for name, engine in check_directory(directory, DIMS).engines.items()}


@pytest.mark.parametrize("files", [HeadFiles(), PublishedMixerFiles()], ids=["compact", "published form"])
def test_a_head_is_saved_loaded_and_served_by_nobody(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: HeadFiles
) -> None:
    head = register(monkeypatch, files)
    save_head(head, tmp_path / "saved", {"target": {"name": "tiny"}})
    assert same_state(load_head(tmp_path / "saved", DIMS), head) and same_state(load_head(tmp_path / "saved"), head)

    report = check_directory(tmp_path / "saved", DIMS)
    assert report.family == "mixer" and report.served == [] and report.loads("headstart")
    assert handlings(tmp_path / "saved") == {"headstart": Handling.LOADS, **dict.fromkeys(FORMATS, Handling.REFUSES)}
    assert report.engines["tgi"].reasons == ["TGI does not draft with mixer heads; it drafts with medusa"]

    side = json.loads((tmp_path / "saved" / "headstart.json").read_text())
    assert side["type"] == "mixer" and side["facts"] == files.facts and side["feature_layers"] == [2, 5]
    card = render_card("user/mixer", side, None, [])
    assert "Mixer draft head for **tiny**" in card and "arXiv:2501.00001" in card and "Doe, Jane" in card


def test_others_files_become_heads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    head = register(monkeypatch, PublishedMixerFiles())
    save_head(head, tmp_path, {})
    (tmp_path / "headstart.json").unlink()
    report = check_directory(tmp_path, DIMS)
    assert report.layout == "Mixer" and report.loads("headstart")
    assert same_state(load_head(tmp_path, DIMS), head)


def test_draft_ids_are_those_of_a_draft_vocabulary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    head = register(monkeypatch, HeadFiles())
    head.draft_ids_U[0] = DIMS.vocab_size  # no token of the target
    save_head(head, tmp_path, {})
    with pytest.raises(FormatError, match="draft_ids_U .* is no ascending list"):
        load_head(tmp_path, DIMS)


def test_an_engine_that_serves_it_says_so_in_its_own_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def rules(case: Case) -> None:
        if case.config["mixer_width"] > 12:
            case.misread("it reads 12 rows")

    monkeypatch.setitem(FORMATS["vllm"].serves, "mixer", Rules(rules, shards=True))
    head = register(monkeypatch, PublishedMixerFiles())
    reports = export_head(head, tmp_path / "narrow", ExportConfig(engines=["portable", "vllm"]), {})
    assert all(report.served == ["vllm"] for report in reports.values())
    wide = our_head(MixerConfig(depth=2, width=13))
    with pytest.raises(FormatError, match="vLLM 0.32 loads wrongly: it reads 12 rows"):
        export_head(wide, tmp_path / "wide", ExportConfig(), {})
