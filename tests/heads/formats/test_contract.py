"""What every family promises about its files: saved and loaded, exported for every engine that serves it, and back.

It runs over `FAMILIES` and `FORMATS` and names none of them; `reference/families.py` lists the heads.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from format_layouts import same_state
from reference.families import VOCAB, WIDTH, Example, example_head, examples
from reference.tiny import ends_of, feature_batch, random_document, teacher_of

from headstart.heads.base import Loss
from headstart.heads.checkpoints.head_files import COMPACT
from headstart.heads.checkpoints.raw import open_checkpoint
from headstart.heads.errors import ConfigError, FormatError
from headstart.heads.families import FAMILIES
from headstart.heads.formats import ExportConfig, check_directory, export_head, load_head, save_head
from headstart.heads.formats.engines import FORMATS
from headstart.heads.formats.export import PORTABLE
from headstart.heads.formats.recognise import recognise

HEADS = {name: example for name, example in examples() if not example.loss_only}
each_head = pytest.mark.parametrize("example", HEADS.values(), ids=HEADS)


@each_head
def test_save_then_load_is_bit_equal(tmp_path: Path, example: Example) -> None:
    head, _ = example_head(example)
    save_head(head, tmp_path / "head", {"target": {"name": "tiny"}, "recipe": {"seed": 1}, "git_revision": "abc"})
    loaded = load_head(tmp_path / "head", example.dims)
    assert same_state(head, loaded)
    assert loaded.config == head.config and loaded.dims == head.dims and loaded.spec == head.spec
    side = json.loads((tmp_path / "head/headstart.json").read_text())
    assert side["type"] == head.family and side["feature_layers"] == list(head.spec.layer_ids)
    assert side["target"] == {"name": "tiny"} and side["recipe"] == {"seed": 1}
    assert side["provenance"] == {"git_revision": "abc"}
    assert check_directory(tmp_path / "head", example.dims).loads("headstart")


@each_head
def test_damaged_weights_are_noticed(tmp_path: Path, example: Example) -> None:
    save_head(example_head(example)[0], tmp_path, {})
    content = bytearray((tmp_path / "model.safetensors").read_bytes())
    content[-5] ^= 1
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(FormatError, match="was changed or damaged after the head was saved"):
        load_head(tmp_path, example.dims)
    assert not check_directory(tmp_path, example.dims).loads("headstart")


@each_head
def test_bfloat16_files_hold_the_rounded_weights(tmp_path: Path, example: Example) -> None:
    head, _ = example_head(example)
    save_head(head, tmp_path / "head", {}, torch.bfloat16)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    loaded = load_head(tmp_path / "head")
    assert same_state(head, loaded)
    assert all(p.dtype == torch.float32 for p in loaded.parameters())
    assert json.loads((tmp_path / "head/config.json").read_text())["dtype"] == "bfloat16"


@each_head
def test_without_its_side_file_a_directory_is_the_same_head_or_says_what_is_missing(
    tmp_path: Path, example: Example
) -> None:
    head, _ = example_head(example)
    save_head(head, tmp_path / "head", {})
    side = json.loads((tmp_path / "head/headstart.json").read_text())
    (tmp_path / "head/headstart.json").unlink()
    if side["layout"] == COMPACT:
        with pytest.raises(FormatError, match="config.json: "):
            load_head(tmp_path / "head", example.dims)
        return
    loaded = load_head(tmp_path / "head", example.dims)
    assert same_state(head, loaded) and loaded.spec == head.spec
    assert loaded.dims.rope_parameters == example.dims.rope_parameters


@each_head
def test_one_family_recognises_its_files_whatever_the_order_of_families(tmp_path: Path, example: Example) -> None:
    head, _ = example_head(example)
    save_head(head, tmp_path, {})
    raw = open_checkpoint(tmp_path)
    assert recognise(raw) == head.family
    if raw.sidecar["layout"] != COMPACT:
        assert [name for name, family in FAMILIES.items() if family.files.recognise(raw)] == [head.family]


@each_head
@pytest.mark.parametrize("engine", [PORTABLE, *FORMATS])
def test_an_export_loads_in_its_engine_and_comes_back(tmp_path: Path, example: Example, engine: str) -> None:
    """For every engine that serves the family; the others are refused by name, before anything is written."""
    head, ends = example_head(example)
    place, config = tmp_path / "export", ExportConfig([engine], "float32")
    written_for = [engine]
    if engine == PORTABLE:
        written_for = [key for key, other in FORMATS.items() if other.loads_portable(head.family)]
    elif head.family not in FORMATS[engine].serves:
        with pytest.raises(ConfigError, match=f"{FORMATS[engine].name} does not serve {head.family} heads"):
            export_head(head, place, config, {"target": {"name": "t"}})
        assert not place.exists()
        return
    if engine in example.refused:
        with pytest.raises(FormatError, match="Set export.force=true to keep it all the same"):
            export_head(head, place, config, {"target": {"name": "t"}})
        return
    reports = export_head(head, place, config, {"target": {"name": "t"}})
    checked = check_directory(place, example.dims)
    for name in (*written_for, *(["headstart"] if engine == PORTABLE else [])):
        assert reports[engine].loads(name) and checked.loads(name), checked.render()
    back = load_head(place, example.dims)
    back.bind(ends_of(ends))
    pattern = ["..AAAAAA.B..CCC", "AAAA", "...AABBBBB"]
    documents = [random_document(letters, VOCAB, WIDTH, 3, seed) for seed, letters in enumerate(pattern)]
    batch, teacher = feature_batch(documents, ends, head.depth), teacher_of(ends)
    with torch.no_grad():
        found, expected = (each.eval().loss(batch, teacher) for each in (back, head))
    assert_equal_but_for_rounding(found, expected)


def assert_equal_but_for_rounding(found: Loss, expected: Loss) -> None:
    """Matrices that an export has summed up give other orders of the same sums."""
    torch.testing.assert_close(found.sum_T, expected.sum_T, rtol=1e-5, atol=1e-4)
    for values in ("count_T", "numerator_M", "denominator_M"):
        assert getattr(found, values).tolist() == getattr(expected, values).tolist(), values
