"""What others named (tasks, targets, notes, servers) is shown as it is, and nothing more, wherever it is written."""

from __future__ import annotations

import io
import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from headstart.eval.measuring.compare import comparison_markdown, comparison_table
from headstart.eval.measuring.rendering import render_markdown, render_tables
from headstart.eval.measuring.report import Report, Section
from headstart.heads.formats.card import render_card
from headstart.heads.formats.launch import launch_commands

HOSTILE = (
    "[red]x[/red] \x1b[31m|cell| ![i](http://localhost/p) [l](u) <script>1</script> `c` **b** \n# h\n- l $f$ \u202e"
)
#: the same as a reader sees it
SEEN = HOSTILE.replace("\x1b", "\\x1b").replace("\n", "\\n").replace("\u202e", "\\u202e")


def hostile_report() -> Report:
    section = Section(2, 10, 20, 2.0, None, [0.5], [0.5], 10.0, 5.0, 1.5)
    return Report(
        target={"name": HOSTILE}, head=None, drafter="eagle3", data={"path": "own data", "sha256": "x"}, dtype="float",
        device=HOSTILE, temperature=0.0, lossless=True, tree={"label": "chain3"}, batch_size=1, max_new_tokens=9,
        prompts=4, forwards=20, tokens=50, tau=2.5, tau_ci95=[2.25, 2.75], per_position_acceptance=[0.75, 0.5],
        per_position_conditional=[0.75, 0.667], baseline_tokens_per_s=100.0, tokens_per_s=180.0, speedup=1.8,
        tasks={HOSTILE: section, "b": section}, timing={}, sampling={}, recipe={}, versions={"vllm": HOSTILE},
        greedy_identity={
            "dtype": "float32", "sequences": 2, "identical": 1,
            "divergences": [{"id": HOSTILE, "turn": 0, "position": 1, "gap": 0.5}],
        },
        git_revision="r", notes=[HOSTILE], command=f"headstart eval {shlex.quote(HOSTILE)}",
    )  # fmt: skip


def parsed(text: str) -> tuple[list[str], list[Any]]:
    """Shown texts of a Markdown document (one per paragraph, heading, cell), and its other tokens."""
    found = pytest.importorskip("markdown_it").MarkdownIt("commonmark").enable("table").parse(text)
    inline = [token for token in found if token.type == "inline"]
    parts = [part for token in inline for part in token.children]
    shown = ["".join(part.content for part in token.children) for token in inline]
    return shown, [*(token for token in found if token.type != "inline"), *parts]


def kinds(tokens: list[Any]) -> set[str]:
    return {token.type for token in tokens} & {
        "link_open",
        "image",
        "html_block",
        "html_inline",
        "strong_open",
        "em_open",
    }


@pytest.mark.parametrize(
    "write", [render_markdown, lambda report: comparison_markdown({"one": report, HOSTILE: report})]
)
def test_markdown(write: Any) -> None:
    text = write(hostile_report())
    shown, tokens = parsed(text)
    assert kinds(tokens) == set() and "\x1b" not in text and "\u202e" not in text
    assert SEEN in shown and sum(SEEN in part for part in shown) >= 4
    rows, cells = (sum(token.type == kind for token in tokens) for kind in ("tr_open", "td_open"))
    assert rows and cells and len([token for token in tokens if token.type == "heading_open"]) <= 4


def test_the_terminal() -> None:
    for draw in (
        lambda console: console.print(render_tables(hostile_report())),
        lambda console: console.print(comparison_table({"one": hostile_report(), HOSTILE: hostile_report()})),
    ):
        out = io.StringIO()
        draw(Console(file=out, width=400, force_terminal=False))
        assert "[red]x[/red] \\x1b[31m|cell|" in out.getvalue()
        assert not set(out.getvalue()) & set("\x1b\u202e")


def test_the_card() -> None:
    side = {
        "type": "eagle3", "config": {"depth": 3}, "target": {"name": HOSTILE, "revision": HOSTILE},
        "recipe": {"train": {"note": f"{HOSTILE}\n```\n</details>"}, "data": {"sources": [{"path": "workload:x](y)"}]}},
        "provenance": {"git_revision": HOSTILE, "device": "\u202e"},
        "tuned": {HOSTILE: {"batches": {"1": {
            "label": HOSTILE, "tree": {"kind": "chain", "depth": 2}, "tau": 2.0, "predicted_speedup": 1.5,
            "measured_speedup": 1.5, "speculate": True,
        }}}},
    }  # fmt: skip
    licence = "mit\nbase_model: [evil]\n---\n# x"
    card = render_card("me/head", side, hostile_report().to_json(), ["vllm"], licence)
    front, body = card.removeprefix("---\n").split("\n---\n\n", 1)
    found = yaml.safe_load(front)
    assert found["license"] == licence and "base_model" not in found and found["tags"][2] == "eagle3"
    shown, tokens = parsed(body)
    assert kinds(tokens) <= {"html_block", "strong_open", "em_open", "link_open"}
    # our own: two folded blocks, the paper
    assert sum(token.type == "html_block" for token in tokens) == 4
    links = [token.attrs["href"] for token in tokens if token.type == "link_open"]
    assert links == ["https://arxiv.org/abs/2503.01840"]
    assert [token for token in tokens if token.type in ("html_inline", "image")] == []
    assert SEEN in shown and not set(card) & set("\x1b\u202e")
    blocks = [token.content for token in tokens if token.type == "fence" and token.info == "json"]
    assert json.loads(blocks[0])["train"]["note"] == f"{HOSTILE}\n```\n</details>"


@pytest.mark.parametrize("model", ['runs/it\'s a $(touch x) `y` "z" %s: #1/export', "me/head"])
def test_launch_commands_are_what_a_shell_takes(model: str, tmp_path: Path) -> None:
    side = {"type": "eagle3", "config": {"depth": 3}, "target": {"name": "a/b"}}
    commands = launch_commands(model, side, ["vllm", "sglang", "tgi", "tensorrt_llm"])
    words = shlex.split(commands["vllm"])
    assert words[:3] == ["vllm", "serve", "a/b"]
    assert json.loads(words[4]) == {"method": "eagle3", "model": model, "num_speculative_tokens": 3}
    assert model in shlex.split(commands["sglang"]) and model in shlex.split(commands["tgi"])
    written = commands["tensorrt_llm"].rsplit("\n", 1)[0]
    subprocess.run(["bash", "-c", written], cwd=tmp_path, check=True, timeout=30)
    assert [path.name for path in tmp_path.iterdir()] == ["spec.yaml"]
    settings = {"decoding_type": "Eagle3", "max_draft_len": 3, "speculative_model": model}
    assert yaml.safe_load((tmp_path / "spec.yaml").read_text()) == {"speculative_config": settings}
