"""Publishing: the card says what the report says, the upload follows the Hub's protocol, failures name their remedy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import yaml
from fake_hub import local_hub
from format_layouts import DFLASH_CONFIG, DIMS, U, dflash_tensors, our_head, same_state, write
from huggingface_hub import HfApi

from headstart.heads.errors import ConfigError, FormatError, StorageError
from headstart.heads.families.eagle.head import EagleConfig
from headstart.heads.families.eagle3.head import Eagle3Config
from headstart.heads.families.medusa.head import MedusaConfig
from headstart.heads.files import write_json, write_safetensors
from headstart.heads.formats import ExportConfig, export_head, load_head, plots, save_head
from headstart.heads.formats.card import render_card
from headstart.heads.formats.check import check_directory
from headstart.heads.formats.hub import fetch_head, push_export
from headstart.heads.formats.plots import draw_plots
from headstart.heads.formats.tuned_card import target_card
from headstart.heads.targets.tuned import read_adapter

PROVENANCE = {
    "target": {"name": "someone/tiny-llama", "revision": "abc123"},
    "recipe": {"train": {"lr": 0.001}},
    "git_revision": "deadbeef",
}
ROW = {
    "prompts": 12,
    "tau": 1.834,
    "per_position_acceptance": [0.51, 0.32],
    "baseline_tokens_per_s": 20.0,
    "tokens_per_s": 30.0,
    "speedup": 1.5,
}
REPORT = {
    **ROW,
    "tasks": {"letters": {**ROW, "prompts": 5, "tau": 2.001}},
    "greedy_identity": {"dtype": "float32", "sequences": 12, "identical": 12},
    "tree": {"label": "chain2"},
    "temperature": 0.0,
    "dtype": "float32",
    "batch_size": 1,
    "device": "a processor",
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with local_hub(monkeypatch) as server:
        yield server


def api_of(hub: Any, token: str = "secret") -> HfApi:
    return HfApi(endpoint=hub.address, token=token)


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    export_head(our_head(Eagle3Config(draft_vocab_size=U)), tmp_path / "export", ExportConfig(), PROVENANCE)
    return tmp_path / "export"


TO = ExportConfig(push_to_hub="me/head", private=True)


def test_push_uploads_the_head_and_its_card(hub: Any, exported: Path, tmp_path: Path) -> None:
    url = push_export(exported, TO, REPORT, api_of(hub))
    assert url.endswith("/me/head")
    assert hub.created["name"] == "head" and hub.created["organization"] == "me"
    images = {"acceptance.png", "tasks.png"}
    assert set(hub.files) == {"config.json", "headstart.json", "model.safetensors", "README.md", "report.json", *images}
    assert json.loads(hub.files["report.json"]) == REPORT
    assert all(hub.files[name].startswith(b"\x89PNG") and name.encode() in hub.files["README.md"] for name in images)
    assert hub.messages == ["eagle3 head for someone/tiny-llama"]
    assert b"license: apache-2.0" in hub.files["README.md"]
    for name, content in hub.files.items():  # what arrived is a head
        (tmp_path / "arrived").mkdir(exist_ok=True)
        (tmp_path / "arrived" / name).write_bytes(content)
    assert same_state(load_head(tmp_path / "arrived", DIMS), load_head(exported, DIMS))


def test_acceptance_that_was_asked_for_is_not_published(hub: Any, exported: Path) -> None:
    push_export(exported, TO, {**REPORT, "synthetic": [0.8]}, api_of(hub))
    assert "report.json" not in hub.files and "Not measured" in hub.files["README.md"].decode()


def test_a_failed_commit_is_tried_again_without_sending_the_weights_twice(hub: Any, exported: Path) -> None:
    hub.failures = [502, 502]
    waits: list[float] = []
    push_export(exported, TO, None, api_of(hub), waits.append)
    assert hub.messages and waits
    assert sum(command == "PUT" for command, _ in hub.requests) == 1


def test_running_the_command_again_continues_an_upload(hub: Any, exported: Path) -> None:
    hub.failures = [503] * 4
    with pytest.raises(StorageError, match="not sent twice"):
        push_export(exported, TO, None, api_of(hub), lambda _: None)
    push_export(exported, TO, None, api_of(hub), lambda _: None)
    assert sum(command == "PUT" for command, _ in hub.requests) == 1 and hub.messages


def test_shards_are_pushed_with_their_index(hub: Any, tmp_path: Path) -> None:
    config = ExportConfig(dtype="float32", max_shard_size="30KB", push_to_hub="me/head")
    export_head(our_head(Eagle3Config(draft_vocab_size=U)), tmp_path, config, PROVENANCE)
    push_export(tmp_path, config, None, api_of(hub))
    assert {"model-00001-of-00003.safetensors", "model.safetensors.index.json"} <= set(hub.files)


def test_only_the_root_of_an_export_is_pushed(hub: Any, tmp_path: Path) -> None:
    """A folder's weights without its config would be no head, and engines read the root only."""
    config = ExportConfig(["portable", "sglang"], push_to_hub="me/head")
    export_head(our_head(EagleConfig()), tmp_path, config, PROVENANCE)
    push_export(tmp_path, config, None, api_of(hub))
    assert (tmp_path / "sglang/model.safetensors").is_file()
    assert set(hub.files) == {"config.json", "headstart.json", "model.safetensors", "README.md"}


def test_weights_of_an_earlier_push_are_removed(hub: Any, tmp_path: Path) -> None:
    head, kept = our_head(Eagle3Config(draft_vocab_size=U)), {"notes.txt": b"mine", "more/model.safetensors": b"other"}
    for name, size in (("one", None), ("many", "30KB"), ("one", None)):
        config = ExportConfig(dtype="float32", max_shard_size=size, push_to_hub="me/head")
        export_head(head, tmp_path / name, config, PROVENANCE)
        hub.files |= kept
        push_export(tmp_path / name, config, None, api_of(hub))
        here = {path.name for path in (tmp_path / name).iterdir()}
        assert set(hub.files) == {*here, *kept}


def test_a_hub_that_stays_down_says_how_to_continue(hub: Any, exported: Path) -> None:
    hub.failures = [503] * 100
    with pytest.raises(StorageError, match="run the same command again"):
        push_export(exported, TO, None, api_of(hub), lambda _: None)


def test_an_unreachable_hub_says_how_to_continue(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    api = HfApi(endpoint="http://127.0.0.1:9", token="secret")
    with pytest.raises(StorageError, match="out of reach"):
        push_export(exported, TO, None, api, lambda _: None)


def test_a_token_that_may_not_write(hub: Any, exported: Path) -> None:
    with pytest.raises(ConfigError, match="write access"):
        push_export(exported, TO, None, api_of(hub, "stranger"), lambda _: None)


def test_no_token(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(ConfigError, match=r"hf auth login.*complete in"):
        push_export(exported, TO, None, HfApi(token=None))


def test_offline_is_said_at_once(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    waits: list[float] = []
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set: unset it.*complete in"):
        push_export(exported, TO, None, HfApi(token="secret"), waits.append)
    assert not waits


@pytest.mark.parametrize("name", ["head", "me/head/more", "me/he ad", "../x", ""])
def test_bad_repository_names(exported: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"push_to_hub: found .*user/name"):
        push_export(exported, ExportConfig(push_to_hub=name), None, HfApi(token="secret"))


def test_only_exports_are_pushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(FormatError, match="headstart export"):
        push_export(tmp_path, TO, None, HfApi(token="secret"))


def test_the_card_holds_the_measured_numbers_and_launch_commands(exported: Path) -> None:
    side = json.loads((exported / "headstart.json").read_text())
    card = render_card("me/head", side, REPORT, ["headstart", "vllm", "sglang"], "apache-2.0")
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["base_model"] == ["someone/tiny-llama"] and front["license"] == "apache-2.0"
    assert "eagle3" in front["tags"]
    assert "| all | 12 | 1.834 | 0.510 0.320 | 20.00 | 30.00 | 1.50 |" in card
    assert "| letters | 5 | 2.001 |" in card
    assert "vllm serve someone/tiny-llama --speculative-config" in card and '"method": "eagle3"' in card
    assert "--speculative-algorithm EAGLE3" in card and "text-generation-launcher" not in card
    assert "12 of 12 sequences" in card and "chain2" in card and '"lr": 0.001' in card and "deadbeef" in card
    assert "2503.01840" in card and "licence applies" in card
    assert "temperature 0, float32" in card
    drawn = {**REPORT, "temperature": 1.0, "verification": "block"}
    assert "chain2, temperature 1, block verification, " in render_card("me/head", side, drawn, ["vllm"])


def test_the_card_marks_what_is_lossy(exported: Path) -> None:
    side = json.loads((exported / "headstart.json").read_text())
    lossy = {**REPORT, "lossless": False, "greedy_identity": None, "notes": ["a first note", "a second one"]}
    card = render_card("me/head", side, lossy, ["vllm"])
    head = (
        "| task | prompts | τ (LOSSY) | acceptance by position (LOSSY) | tokens/s plain | tokens/s drafted (LOSSY) | "
        "speed-up (clock) (LOSSY) |"
    )
    assert head in card and "| all | 12 | 1.834 | 0.510 0.320 | 20.00 | 30.00 | 1.50 |" in card
    assert "**LOSSY: typical acceptance, the output distribution is not the target's.**" in card.split(head)[0]
    assert "The results below were not measured so: they are LOSSY." in card.split("## Results")[0]
    assert "\n\n- a first note\n- a second one\n\n" in card
    asked = render_card("me/head", side, {**lossy, "synthetic": [0.8]}, ["vllm"])
    assert "| τ (SYNTHETIC) |" in asked and "**SYNTHETIC: acceptance was asked for" in asked and "LOSSY" not in asked
    for lossless in (REPORT, {**REPORT, "lossless": True, "synthetic": None, "notes": []}, None):
        card = render_card("me/head", side, lossless, ["vllm"])
        assert "LOSSY" not in card and "SYNTHETIC" not in card and "not measured so" not in card


def test_the_card_says_what_the_head_was_trained_on(exported: Path) -> None:
    side = json.loads((exported / "headstart.json").read_text())
    mine = {"path": "mine.jsonl", "limit": None, "sha256": "0123456789abcdef0123"}
    sources = [{"dataset": "some/chats", "limit": 500}, mine]
    side["recipe"]["data"] = {"sources": sources, "distill": {"prompts": [{"path": "asked.jsonl"}], "written": 2000}}
    side["provenance"] |= {
        "data": {"samples": 1234, "supervised_tokens": 56789},
        "training": {"step": 60, "supervised_tokens": 170367},
    }
    card = render_card("me/head", side, REPORT, ["vllm", "tensorrt_llm"], None, ["acceptance.png"])
    chats = "- [some/chats](https://huggingface.co/datasets/some/chats) (first 500)\n"
    assert f"{chats}- own data (sha256 `0123456789abcdef`)\n" in card
    assert "- answers of the target itself to own data\n" in card and ".jsonl`" not in card
    assert "- answers of the target itself to 2,000 prompts that it wrote, at most\n" in card
    assert "1,234 conversations; 56,789 supervised tokens in them; 170,367 supervised tokens seen in 60 steps." in card
    assert "![acceptance](acceptance.png)" in card
    assert "trtllm-serve someone/tiny-llama --backend pytorch" in card
    assert "(revision `abc123`)" in card
    assert "license_link: https://huggingface.co/someone/tiny-llama" in card
    assert "@article{eagle3-2503.01840," in card and "year = {2025}" in card


def choice(kind: str, depth: int, speculate: bool, chain: int | None = None) -> dict[str, Any]:
    best = None if chain is None else {"tree": {"kind": "chain", "depth": chain}, "predicted_speedup": 1.25}
    return {
        "label": f"{kind}{depth}", "tree": {"kind": kind, "depth": depth}, "tau": 2.5, "predicted_speedup": 1.75,
        "measured_speedup": 1.5 if speculate else 0.75, "speculate": speculate, "best_chain": best,
    }  # fmt: skip


def test_the_card_launches_the_tuned_chain(exported: Path) -> None:
    side = json.loads((exported / "headstart.json").read_text())
    assert "tuned" not in side and "Tuned" not in render_card("me/head", side, None, ["vllm"])
    batches = {"8": choice("dynamic", 6, False, 2), "1": choice("dynamic", 7, True, 5), "2": choice("chain", 3, True)}
    side["tuned"] = {"card": {"batches": batches}, "odd": 1, "older": {"batches": {"1": {"label": "x"}}}}
    card = render_card("me/head", side, None, ["vllm", "sglang", "tensorrt_llm"])
    rows = [line for line in card.splitlines() if line.startswith("| card")]
    assert rows[1:] == [
        "| card | 1 | dynamic7 | 2.50 | 1.75× | 1.50× | speculate | 5 (1.25×) |",
        "| card | 2 | chain3 | 2.50 | 1.75× | 1.50× | speculate | 3 (1.75×) |",
        "| card | 8 | dynamic6 | 2.50 | 1.75× | 0.75× | decode plainly | 2 (1.25×) |",
    ]
    assert '"num_speculative_tokens": 5' in card and "--speculative-num-steps 5" in card and "max_draft_len: 5" in card
    assert "5 drafted tokens: the best chain at batch 1 on card (`headstart tune`, 1.25× predicted)." in card
    assert "marginals" not in card
    side["tuned"] = {"card": {"batches": {"1": choice("ddtree", 32, True, 5)}}}
    card = render_card("me/head", side, None, ["vllm"])
    assert "1.25× predicted). The best tree there, ddtree32, measured 1.50×, but engines serve no trees over" in card
    assert '"num_speculative_tokens": 5' in card
    side["tuned"] = {"card": {"batches": {"1": choice("chain", 6, False)}}}
    card = render_card("me/head", side, None, ["vllm"])
    assert "no batch size at which drafting pays" in card and '"num_speculative_tokens": 4' in card


def test_a_tuned_chain_is_no_longer_than_a_medusa_head(tmp_path: Path) -> None:
    export_head(our_head(MedusaConfig(depth=2)), tmp_path, ExportConfig(), PROVENANCE)
    side = json.loads((tmp_path / "headstart.json").read_text())
    side["tuned"] = {"card": {"batches": {"1": choice("chain", 5, True)}}}
    assert '"num_speculative_tokens": 2' in render_card("me/head", side, None, ["vllm"])


def test_launch_commands_name_the_releases_that_serve_the_family(exported: Path, tmp_path: Path) -> None:
    export_head(our_head(MedusaConfig(depth=2)), tmp_path / "head", ExportConfig(), PROVENANCE)
    side = json.loads((tmp_path / "head" / "headstart.json").read_text())
    card = render_card("me/head", side, None, ["vllm", "tgi"])
    assert "```bash\n# needs vLLM 0.32 or earlier (run on 0.32): 0.33 has no Medusa" in card
    assert card.count("or earlier") == 1  # TGI's command has no such line
    eagle3 = json.loads((exported / "headstart.json").read_text())
    assert "or earlier" not in render_card("me/head", eagle3, None, ["vllm", "sglang"])


def test_a_registered_target_is_named_as_the_hub_knows_it(exported: Path) -> None:
    side = json.loads((exported / "headstart.json").read_text())
    side["target"] = {"name": "smollm2-135m-instruct"}
    card = render_card("me/head", side, None, ["vllm"])
    assert yaml.safe_load(card.split("---\n")[1])["base_model"] == ["HuggingFaceTB/SmolLM2-135M-Instruct"]
    assert "vllm serve HuggingFaceTB/SmolLM2-135M-Instruct" in card


@pytest.mark.parametrize("family", ["medusa", "eagle", "eagle3"])
def test_every_family_has_a_card(tmp_path: Path, family: str) -> None:
    config = {"medusa": MedusaConfig(depth=2), "eagle": EagleConfig(), "eagle3": Eagle3Config(draft_vocab_size=U)}
    export_head(our_head(config[family]), tmp_path, ExportConfig(), PROVENANCE)
    side = json.loads((tmp_path / "headstart.json").read_text())
    engines = ["vllm", "sglang", "tgi", "tensorrt_llm"]
    card = render_card("me/head", side, {**REPORT, "engine": None}, engines, "mit")
    commands = {
        "medusa": "text-generation-launcher --model-id me/head --speculate 2",
        "eagle": "--speculative-algorithm EAGLE ",
        "eagle3": "trtllm-serve",
    }
    assert commands[family] in card and f'"method": "{family}"' in card and "```bibtex" in card


def test_plots_show_what_was_measured(tmp_path: Path) -> None:
    assert draw_plots(REPORT, tmp_path) == ["acceptance.png", "tasks.png"]
    first = (tmp_path / "acceptance.png").read_bytes()
    draw_plots(REPORT, tmp_path)
    assert (tmp_path / "acceptance.png").read_bytes() == first
    draw_plots({**REPORT, "per_position_acceptance": [0.9, 0.1]}, tmp_path)
    assert (tmp_path / "acceptance.png").read_bytes() != first
    tasks = {f"task {n}": {**ROW, "prompts": n} for n in range(1, 30)}
    assert draw_plots({**REPORT, "tasks": tasks, "speedup": None}, tmp_path) == ["acceptance.png", "tasks.png"]
    plain = {**REPORT, "tasks": {}, "per_position_acceptance": []}
    assert draw_plots(plain, tmp_path / "plain") == ["tasks.png"]


def test_the_texts_of_prompts_are_not_uploaded(hub: Any, exported: Path) -> None:
    sample = {"task": "t", "prompt": "a secret", "first": "x", "cycles": [], "tau": 1.0, "finish_reason": "stop"}
    given = {**REPORT, "samples": [sample]}
    push_export(exported, TO, given, api_of(hub))
    assert json.loads(hub.files["report.json"]) == {**REPORT, "samples": None}
    assert b"a secret" not in b"".join(bytes(content) for content in hub.files.values())
    assert given["samples"] == [sample]  # the caller's report is as it was


def test_plots_show_values_intervals_and_whose_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: dict[str, tuple[str, set[str], int]] = {}

    def save(figure: Any, place: Path) -> None:
        texts = {text.get_text() for axes in figure.axes for text in axes.texts}
        ends = sum(len(part.get_segments()) for axes in figure.axes for part in axes.collections)
        drawn[place.name.split(".png")[0].lstrip(".")] = (figure.get_suptitle(), texts, ends)
        place.write_bytes(b"")

    monkeypatch.setattr(plots, "save_figure", save)
    speeds = {"baseline_tokens_per_s": 20.0, "speculative_tokens_per_s": 30.0, "tau": 2.0, "tau_ci95": [1.9, 2.1]}
    sweeps = {"batch": {"points": [{"batch": n, "speedup": 1 + n / 8, **speeds} for n in (1, 2)]}}
    tasks = {name: {**ROW, "tau_ci95": [1.75, 2.0], "speedup_ci95": [1.25, 1.625]} for name in "ab"}
    report = {
        **REPORT, "drafter": "eagle3", "target": {"name": "SmolLM2"}, "tasks": tasks, "sweeps": sweeps,
        "cycle": {"draft_ms": 1.0, "verify_ms": 2.0, "rest_ms": 0.5},
    }  # fmt: skip
    assert draw_plots(report, tmp_path) == ["acceptance.png", "tasks.png", "cycle.png", "speedup_by_batch.png"]
    assert {title for title, _, _ in drawn.values()} == {"eagle3 on SmolLM2, chain2"}
    by_name = {next(key for key in ("acceptance", "tasks", "cycle", "batch") if key in name): value
               for name, value in drawn.items()}  # fmt: skip
    assert by_name["acceptance"][1] == {"0.51", "0.32"}
    assert by_name["tasks"][1] == {"1.83", "1.50"} and by_name["tasks"][2] == 6  # τ and speed-up of all, a and b
    assert by_name["cycle"][1] == {"3.50", f"{3.5 / 1.834:.2f}", "50.00"}
    assert by_name["batch"][1] == {"1.12", "1.25"} and by_name["batch"][2] == 2


def test_a_single_bar_is_not_drawn(tmp_path: Path) -> None:
    alone = {**REPORT, "tasks": {}, "speedup": None, "per_position_acceptance": [0.5]}
    assert draw_plots(alone, tmp_path) == [] and list(tmp_path.iterdir()) == []
    assert draw_plots({**alone, "speedup": 1.5}, tmp_path) == ["tasks.png"]


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"lossless": True, "synthetic": None}, None),
        ({"lossless": False, "synthetic": None}, "LOSSY (typical acceptance)"),
        ({"lossless": False, "synthetic": [0.8]}, "SYNTHETIC acceptance"),
    ],
)
def test_every_plot_says_what_it_rests_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], flag: str | None
) -> None:
    titles: dict[str, str] = {}

    def save(figure: Any, place: Path) -> None:
        figure.draw_without_rendering()
        (box, *_), edge = [axes.title.get_window_extent() for axes in figure.axes], figure.bbox
        assert edge.x0 <= box.x0 and box.x1 <= edge.x1 and box.y1 <= edge.y1  # nothing of it lies outside the picture
        titles[figure.axes[0].get_title()] = str(place)
        place.write_bytes(b"")

    monkeypatch.setattr(plots, "save_figure", save)
    speeds = {"baseline_tokens_per_s": 20.0, "speculative_tokens_per_s": 30.0, "speedup": 1.5}
    sweeps = {name: {"points": [{name: n, **speeds} for n in (1, 2)]} for name in ("batch", "context")}
    cycle = {"draft_ms": 1.0, "verify_ms": 2.0, "rest_ms": 0.5}
    written = draw_plots({**REPORT, "sweeps": sweeps, "cycle": cycle, **changes}, tmp_path)
    assert len(written) == len(titles) == 5
    for title in titles:
        assert title.split("\n")[:-1] == ([] if flag is None else [flag])


def test_a_card_without_measurements_or_hub_name_claims_nothing(tmp_path: Path) -> None:
    export_head(our_head(EagleConfig()), tmp_path, ExportConfig(), {"target": {"name": "/models/local"}})
    card = render_card("me/head", json.loads((tmp_path / "headstart.json").read_text()), None, ["vllm"])
    assert "Not measured" in card and "base_model" not in card and "license: other" in card


def test_fetching_a_head_that_is_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(FormatError, match=r"someone/nothing@v1.*local directory"):
        fetch_head("someone/nothing@v1", cache_dir=tmp_path)


def published(directory: Path, more: dict[str, bytes] | None = None) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()} | (more or {})


QUALITY = {
    "tokens": 12345, "conversations": 40, "perplexity_original": 7.1, "perplexity_tuned": 7.123, "rise": 0.00324,
    "dtype": "bfloat16", "max_perplexity_rise": 0.01, "passed": True,
    "on_prompts": {
        "tokens": 6789, "perplexity_original": 20.25, "perplexity_tuned": 20.29, "rise": 0.001975, "judged": True,
    },
    "answers": {
        "prompts": 32, "identical": 20, "common_prefix": 55.5, "length_original": 100.0, "length_tuned": 99.0,
        "perplexity_own": 1.25, "perplexity_tuned": 1.5,
    },
}  # fmt: skip


def tuned_export(directory: Path, served: str | None) -> Path:
    """An export of a head that drafts for a tuned target, with files of an adapter and of a merged target."""
    write_json(directory / "adapter" / "adapter_config.json", {"peft_type": "LORA", "r": 4, "lora_alpha": 8})
    tensors = {f"base_model.model.q_proj.lora_{part}.weight": torch.ones(4, 4) for part in "AB"}
    write_safetensors(directory / "adapter" / "adapter_model.safetensors", tensors)
    (directory / "adapter" / "notes.txt").write_text("private")
    target = {
        **PROVENANCE["target"], "adapter": "adapter", "adapter_digest": read_adapter(directory / "adapter").digest,
        "adapter_rank": 4, **({"served_as": served} if served else {}),
    }  # fmt: skip
    if served:
        write_json(directory / "target" / "config.json", {"model_type": "llama"})
        write_safetensors(directory / "target" / "model.safetensors", {"a": torch.ones(2)})
        (directory / "target" / "notes.md").write_text("private")
    origin = {**PROVENANCE, "target": target, "quality": QUALITY}
    export_head(our_head(MedusaConfig(depth=2)), directory, ExportConfig(), origin)
    return directory


def test_a_tuned_target_is_pushed_into_a_repository_of_its_own(hub: Any, tmp_path: Path) -> None:
    place = tuned_export(tmp_path / "export", "me/head-target")
    hub.target_files["model-00001-of-00002.safetensors"] = b"of an earlier export"
    push_export(place, TO, None, api_of(hub))
    assert set(hub.target_files) == {"config.json", "model.safetensors", "README.md"}
    adapter = {"adapter/adapter_config.json", "adapter/adapter_model.safetensors"}
    assert set(hub.files) == {"config.json", "headstart.json", "model.safetensors", "README.md"} | adapter
    front = yaml.safe_load(hub.target_files["README.md"].decode().split("---\n")[1])
    assert front["base_model"] == ["someone/tiny-llama"] and front["base_model_relation"] == "finetune"
    assert front["license"] == "apache-2.0"
    said = hub.target_files["README.md"].decode()
    assert "[me/head](https://huggingface.co/me/head)" in said and "+0.32 %" in said
    assert "vllm serve me/head-target --speculative-config" in hub.files["README.md"].decode()


def test_the_cards_say_whether_head_and_adapter_were_trained_together(tmp_path: Path) -> None:
    side = json.loads((tuned_export(tmp_path / "export", "me/head-target") / "headstart.json").read_text())
    alone = {**side, "recipe": {"joint": {"enabled": False}}}
    assert "trained together" not in render_card("me/head", side, None, []) + render_card("me/head", alone, None, [])
    for other in (side, alone):
        said = target_card("me/head-target", "me/head", other, None)
        assert "(https://huggingface.co/me/head) was trained for it" in said and "tuned so that" not in said
    joint = {**side, "recipe": {"joint": {"enabled": True}}}
    assert "The adapter was trained together with the head." in render_card("me/head", joint, None, [])
    assert "it was tuned so that the draft head [me/head]" in target_card("me/head-target", "me/head", joint, None)


def test_a_target_that_was_exported_for_another_repository_is_not_pushed(hub: Any, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="run `headstart export` again with this repository"):
        push_export(tuned_export(tmp_path / "export", "target"), TO, None, api_of(hub))
    assert not hub.files and not hub.target_files


def test_the_card_says_that_the_target_was_tuned(tmp_path: Path) -> None:
    merged = json.loads((tuned_export(tmp_path / "merged", "me/head-target") / "headstart.json").read_text())
    card = render_card("me/head", merged, None, ["vllm", "tgi"])
    assert "lossless relative to the *tuned* target" in card and "the whole model `me/head-target`" in card
    assert "the output is the tuned target's own" in card
    assert "| perplexity on held-out answers | 7.1 | 7.123 |" in card
    assert "| the original's perplexity over these answers | 1.25 | 1.5 |" in card
    assert "| perplexity on their prompts | 20.25 | 20.29 |" in card
    assert "Measured in bfloat16. On 12,345 tokens of held-out answers the perplexity changed by +0.32 %, on" in card
    assert ", on 6,789 tokens of their prompts by +0.20 %; the recipe allows +1 %." in card
    assert "20 of 32 greedy answers are the same" in card and "first 55.5 tokens agree" in card
    assert "text-generation-launcher --model-id me/head" in card and "cd " not in card
    separate = json.loads((tuned_export(tmp_path / "separate", None) / "headstart.json").read_text())
    card = render_card("me/head", separate, None, ["vllm", "tgi"])
    assert "the adapter in the folder `adapter`" in card and "text-generation-launcher" not in card
    assert "hf download me/head --include 'adapter/*' --local-dir head" in card
    assert "vllm serve someone/tiny-llama --enable-lora --max-lora-rank 8 --lora-modules tuned=head/adapter" in card
    separate["quality"]["on_prompts"]["judged"] = False
    assert "of their prompts (too few to judge) by +0.20 %" in render_card("me/head", separate, None, ["vllm"])
    del separate["quality"]["on_prompts"]  # as measured by an older version
    card = render_card("me/head", separate, None, ["vllm"])
    assert "by +0.32 %, their prompts were not measured; the recipe" in card and "perplexity on their" not in card
    del separate["quality"]
    assert "What the adapter changed was not measured." in render_card("me/head", separate, None, ["vllm"])
    plain = {**separate, "target": PROVENANCE["target"]}
    assert "tuned" not in render_card("me/head", plain, None, ["vllm"])


def test_engines_are_told_which_target_to_serve(tmp_path: Path) -> None:
    merged = check_directory(tuned_export(tmp_path / "merged", "target"))
    assert any("serve the merged model 'target'" in note for note in merged.engines["vllm"].notes)
    separate = check_directory(tuned_export(tmp_path / "separate", None))
    assert any("serve the base with the adapter applied" in note for note in separate.engines["vllm"].notes)
    # an adapter that is not the one of the export shows
    (tmp_path / "separate" / "adapter" / "adapter_config.json").write_text('{"peft_type": "LORA", "lora_alpha": 9}')
    changed = check_directory(tmp_path / "separate")
    assert any("adapter is not the file that was exported" in reason for reason in changed.engines["vllm"].wrong)


def test_a_published_head_is_fetched_with_its_adapter(hub: Any, tmp_path: Path) -> None:
    place = tuned_export(tmp_path / "export", None)
    files = {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}
    hub.published = {"main": {**files, "other/model.safetensors": b"not ours"}}
    fetched = fetch_head("me/published", cache_dir=tmp_path / "cache")
    names = {str(path.relative_to(fetched)) for path in fetched.rglob("*") if path.is_file()}
    adapter = {"adapter/adapter_config.json", "adapter/adapter_model.safetensors"}
    assert names == {"config.json", "headstart.json", "model.safetensors"} | adapter
    assert load_head(fetched).depth == 2


def test_a_published_head_is_fetched_by_revision(hub: Any, tmp_path: Path) -> None:
    heads = {"v1": our_head(EagleConfig()), "main": our_head(Eagle3Config(draft_vocab_size=U))}
    junk = {"modeling_evil.py": b"raise SystemExit", "optimizer.pt": b"x", "README.md": b"# hi"}
    for revision, head in heads.items():
        save_head(head, tmp_path / revision, {}, max_shard_bytes=30_000)
        hub.published[revision] = published(tmp_path / revision, junk)
    for name, revision in (("me/published@v1", "v1"), ("me/published", "main")):
        fetched = fetch_head(name, cache_dir=tmp_path / "cache")
        assert same_state(load_head(fetched, DIMS), heads[revision])
        assert {path.name for path in fetched.iterdir()} == {path.name for path in (tmp_path / revision).iterdir()}
    asked = [path for _, path in hub.requests]
    assert not any(name in path for path in asked for name in junk if "resolve" in path)


def test_an_embedding_beside_the_weights_is_fetched_so_that_the_reader_sees_it(hub: Any, tmp_path: Path) -> None:
    files = published(write(tmp_path / "head", DFLASH_CONFIG, dflash_tensors()), {"mask_embedding.pt": b"pickled"})
    hub.published["v1"] = files
    with pytest.raises(FormatError, match="mask_embedding.pt: an embedding of the mask token"):
        load_head(fetch_head("me/published", "v1", tmp_path / "cache"), DIMS)


def test_a_fetched_head_is_there_without_the_hub(hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_head(our_head(EagleConfig()), tmp_path / "head", {})
    hub.published["v1"] = published(tmp_path / "head")
    first = fetch_head("me/published", "v1", tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert fetch_head("me/published@v1", cache_dir=tmp_path / "cache") == first


def test_an_unknown_revision_is_named(hub: Any, tmp_path: Path) -> None:
    hub.published["v1"] = {}
    with pytest.raises(FormatError, match=r"me/published@v9.*Check the name and revision"):
        fetch_head("me/published@v9", cache_dir=tmp_path)
