"""Names that the Hub would refuse are refused here first, and say which option or key they came from."""

from __future__ import annotations

from pathlib import Path

import pytest

from headstart.data.config import SourceConfig
from headstart.eval.prompts import eval_sources
from headstart.heads.errors import ConfigError, HeadstartError, TargetError
from headstart.heads.repository import check_head_name, is_repository
from headstart.heads.targets import fetch
from headstart.heads.targets.fetch import locate_target
from headstart.recipes.load import load_exporting, load_recipe
from headstart.saved_heads import find_head

BAD = ["me/he ad", "me/a--b", "me/x..y", "me/" + "x" * 97, "-me/x", "me/x.git", "me/ü"]


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def asked(*_: object) -> None:
        raise AssertionError("the Hub was asked")

    monkeypatch.setattr(fetch, "hub_refusal", asked)
    monkeypatch.setattr("headstart.saved_heads.hub_refusal", asked)
    monkeypatch.setattr("headstart.saved_heads.fetch_head", asked)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", BAD)
def test_bad_names_are_refused_before_the_hub_is_asked(name: str) -> None:
    with pytest.raises(HeadstartError, match="--head"):
        find_head(name)
    with pytest.raises(HeadstartError, match="--head"):
        find_head(f"{name}@v1")
    with pytest.raises(TargetError, match="target.name: found .*Hub id"):
        locate_target(name)
    with pytest.raises(ConfigError, match=r"data.sources\[0\].dataset: found .*expected user/name"):
        SourceConfig(dataset=name).check("data.sources[0]")
    with pytest.raises(ConfigError, match="eval.data.*found"):
        eval_sources(name)
    for key in ("export.push_to_hub", "start_from"):
        with pytest.raises(ConfigError, match=f"{key}: found .*user/name"):
            load_recipe("quickstart", [f"{key}='{name}'"])
    with pytest.raises(ConfigError, match="export.push_to_hub: found .*expected user/name"):
        load_exporting(None, ["target.name=x", f"export.push_to_hub='{name}'"])
    assert not is_repository(name)


@pytest.mark.parametrize("head", ["me/head@", "me/head@a b", "me/head@\x1b"])
def test_bad_revisions(head: str) -> None:
    with pytest.raises(ConfigError, match="expected a branch, tag or commit after @"):
        check_head_name(head, "--head")


def test_good_names_and_directories_pass(tmp_path: Path) -> None:
    (tmp_path / "my heads").mkdir()
    for head in ("me/head", "me/head@v1", "me/head@refs/pr/1", "my heads", "/no/where", "../x y", "runs/a/head"):
        check_head_name(head, "--head")
    SourceConfig(dataset="squad").check("x")
    SourceConfig(dataset="my heads").check("x")
    assert is_repository("meta-llama/Llama-3.1-8B") and not is_repository("gpt2") and not is_repository("./x")
    with pytest.raises(ConfigError, match="found 'head', expected user/name"):
        load_recipe("quickstart", ["export.push_to_hub=head"])
