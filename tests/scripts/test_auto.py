"""`auto`: packs and features that fit are chosen before a run starts, shown by its plan, and kept by it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from headstart import auto
from headstart.recipes.load import load_recipe

AUTO = ("target.device=cpu", "data.pack_tokens=auto")
#: bytes with which the tiny run gets packs of a middle size
SOME = 700 << 20


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the memory that the machine seems to have."""

    def have(size: int) -> None:
        for place in ("headstart.auto", "headstart.plan", "headstart.fit"):
            monkeypatch.setattr(f"{place}.local_device_bytes", lambda device: size)

    return have


def weights(run: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(next((run / "head").glob("*.safetensors")))


def test_a_pack_is_the_largest_that_fits_and_a_step_keeps_its_tokens(recipe: Path) -> None:
    from headstart.heads.targets.load import weightless_target

    asked = load_recipe(recipe, [*AUTO, "train.accumulation=3"])
    target, cpu, before = weightless_target(asked.target), torch.device("cpu"), auto.PACKS[0] + 1
    for size in (8 << 30, 2 << 30, 1 << 30, SOME, 480 << 20):
        chosen = auto.choose(asked, target, cpu, size)
        assert chosen.pack_tokens * chosen.accumulation == 3 * 16384
        assert chosen.peak <= 0.75 * size or chosen.pack_tokens == auto.PACKS[-1]
        assert chosen.pack_tokens <= before
        before = chosen.pack_tokens
    assert before == 256 and chosen.activation_checkpointing, "the least that is tried"
    # a byte less than it needs leads to another choice
    chosen = auto.choose(asked, target, cpu, SOME)
    assert 256 < chosen.pack_tokens < 16384 and not chosen.activation_checkpointing
    assert auto.choose(asked, target, cpu, int(chosen.peak / 0.75) - 4).pack_tokens < chosen.pack_tokens
    assert auto.choose(asked, target, cpu, None).pack_tokens == 16384
    ranks = auto.choose(asked, target, cpu, 8 << 30, ranks=8, node_ranks=8)
    assert ranks.accumulation >= 8 and ranks.pack_tokens * ranks.accumulation == 3 * 16384


@pytest.mark.usefixtures("one_thread")
def test_a_run_keeps_the_packs_it_began_with(
    headstart: Callable, recipe: Path, memory: Callable[[int], None], tmp_path: Path
) -> None:
    memory(SOME)
    planned = headstart("plan", recipe, *AUTO, "--json").json
    pack, packs = planned["layout"]["pack_tokens"], planned["layout"]["accumulation"]
    assert any(f"auto: data.pack_tokens={pack} train.accumulation={packs}" in note for note in planned["notes"])
    assert 256 < pack < 16384

    # the rate does not depend on the budget
    fixed = ("train.schedule=constant", "train.warmup_steps=0")
    steps = ("train.epochs=null", "train.tau_prompts=0", "train.save_every=1", *fixed)
    begun = headstart("train", recipe, *AUTO, *steps, "train.steps=2")
    assert begun.code == 0, begun.err
    assert f"auto: data.pack_tokens={pack} train.accumulation={packs}, for 0.7 GiB" in begun.err
    written = yaml.safe_load((tmp_path / "run/recipe.yaml").read_text())
    assert written["data"]["pack_tokens"] == pack and written["train"]["accumulation"] == packs

    # more memory would choose larger packs: the run goes on with its own
    memory(8 << 30)
    assert auto.choose(load_recipe(recipe, AUTO), _target(recipe), torch.device("cpu"), 8 << 30).pack_tokens > pack
    went_on = headstart("train", recipe, *AUTO, *steps, "train.steps=4")
    assert went_on.code == 0, went_on.err
    assert f"auto: data.pack_tokens={pack} train.accumulation={packs}, as when this run began" in went_on.err
    shown = headstart("plan", recipe, *AUTO, "--json").json
    assert shown["layout"]["pack_tokens"] == pack

    # it ends with the weights of a run that was never stopped
    whole = headstart(
        "train", recipe, "target.device=cpu", f"data.pack_tokens={pack}", f"train.accumulation={packs}", *steps,
        "train.steps=4", f"run_dir={tmp_path}/whole",
    )  # fmt: skip
    assert whole.code == 0, whole.err
    one, other = weights(tmp_path / "run"), weights(tmp_path / "whole")
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)

    # the resolved recipe means the same run
    again = headstart("train", tmp_path / "run/recipe.yaml", "train.steps=4", *steps)
    assert again.code == 0 and "train: finished before" in again.err, again.err

    # where its packs do not fit, it refuses and says what it began with
    memory(300 << 20)
    for verb in ("plan", "train"):
        refused = headstart(verb, recipe, *AUTO, *steps, "train.steps=6")
        said = " ".join(refused.err.split())
        assert refused.code == 2, said
        assert f"began with data.pack_tokens={pack} train.accumulation={packs}, where 0.7 GiB were there" in said
    anew = headstart("plan", recipe, *AUTO, "train.resume=false", "--json").json
    assert anew["plan"]["layout"]["pack_tokens"] == 256, "another choice, which does not fit either"
    assert "auto chose data.pack_tokens=256" in anew["error"]["message"]


def _target(recipe: Path):  # noqa: ANN202
    from headstart.heads.targets.load import weightless_target

    return weightless_target(load_recipe(recipe, AUTO).target)


def test_another_head_chooses_again(headstart: Callable, recipe: Path, memory: Callable[[int], None]) -> None:
    memory(SOME)
    asked = load_recipe(recipe, AUTO)
    chosen = auto.choose(asked, _target(recipe), torch.device("cpu"), SOME)
    auto.keep(asked, chosen)
    assert auto.kept(asked).pack_tokens == chosen.pack_tokens  # type: ignore[union-attr]
    for other in (["head.depth=3"], ["train.accumulation=2"], ["train.resume=false"]):
        assert auto.kept(load_recipe(recipe, [*AUTO, *other])) is None
    place = Path(asked.run_dir) / auto.CHOSEN
    for damaged in ("{", json.dumps({**json.loads(place.read_text()), "pack_tokens": "many"})):
        place.write_text(damaged)
        assert auto.kept(asked) is None


@pytest.mark.parametrize("value", ["some", "0", "-4", "1.5", "true", "'4096'"])
def test_other_words_than_auto_are_refused(headstart: Callable, recipe: Path, value: str) -> None:
    refused = headstart("plan", recipe, f"data.pack_tokens={value}")
    assert refused.code == 2 and "data.pack_tokens" in refused.err
    assert "a whole number" in " ".join(refused.err.split()) or "whole number" in refused.err


def test_features_are_held_where_they_fit(
    headstart: Callable, recipe: Path, memory: Callable[[int], None], tmp_path: Path
) -> None:
    """The same head comes out, wherever its features were."""
    held = ("data.distill.prompts=[]", "target.device=cpu", "train.tau_prompts=0")
    memory(8 << 30)
    planned = headstart("plan", recipe, *held, "data.features=auto", "--json").json
    assert planned["layout"]["features"] == "memory"
    assert "auto: data.features=memory" in planned["notes"]
    ran = headstart("train", recipe, *held, "data.features=auto")
    assert ran.code == 0 and "auto: data.features=memory" in ran.err, ran.err
    # 300 million tokens do not fit a card of 24 GiB
    many = ("--samples", "300000", "--mean-tokens", "1000", "--gpus", "1", "--gpu-memory", "24")
    large = headstart("plan", recipe, "data.features=auto", "--json", *many).json
    assert large["layout"]["features"] == "online" and large["fits"]
    refused = headstart("plan", recipe, "data.features=memory", "--json", "data.max_length=1000", *many)
    assert refused.code == 2
