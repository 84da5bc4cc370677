"""Figures and tables of the documentation say what docs/results holds and what the code computes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import matplotlib
import pytest
from doc_blocks import ROOT, module_at

from headstart.eval.drafters import DRAFTERS
from headstart.heads.families import FAMILIES

Row = dict[str, Any]


@pytest.fixture(scope="module")
def draw() -> ModuleType:
    return module_at(ROOT / "docs/figures/draw.py")


def words_of(svg: str) -> list[str]:
    """What a figure says."""
    return [re.sub(r"<[^>]*>", "", text).strip() for text in re.findall(r"<text.*?</text>", svg, re.DOTALL)]


@pytest.mark.parametrize("name", ["results", "positions", "rollout", "tree", "block", "expected", "overlap"])
def test_figures_are_up_to_date(name: str, draw: ModuleType) -> None:
    """If not: python docs/figures/draw.py"""
    kept, made = (ROOT / f"docs/figures/{name}.svg").read_text(encoding="utf-8"), draw.svg_of(name)
    assert words_of(kept) == words_of(made) and len(words_of(kept)) > 5
    pinned = f"matplotlib=={matplotlib.__version__}" in (ROOT / "constraints.txt").read_text().splitlines()
    assert kept == made or not pinned  # another matplotlib may draw the same numbers otherwise


def test_every_figure_is_tested_and_shown(draw: ModuleType) -> None:
    shown = "".join((ROOT / page).read_text() for page in ("docs/maths.md", "docs/index.md"))
    for name in draw.FIGURES:
        assert f"figures/{name}.svg" in shown
    assert {path.stem for path in (ROOT / "docs/figures").glob("*.svg")} == set(draw.FIGURES)


def rows(name: str, **fields: Any) -> list[Row]:
    """Rows of a file of results whose fields are these."""
    found: list[Row] = json.loads((ROOT / f"docs/results/{name}.json").read_text())
    return [row for row in found if all(row.get(key) == value for key, value in fields.items())]


def one(name: str, field: str, **fields: Any) -> float:
    """The value of the newest row with these fields: files are in the order of measuring."""
    found = rows(name, **fields)
    assert found, f"{name}.json has no row with {fields}"
    return float(found[-1][field])


def fixed(head: str, batch: int) -> float:
    target = "smollm2-135m-instruct"
    return max(row["speedup"] for row in rows("scheduler", head=head, batch=batch, target=target, scheduler="off"))


def smollm2(head: str, eval_set: str, tree: str, seconds: int | None = None, data: str = "") -> float:
    found = rows("smollm2", head=head, eval_set=eval_set, tree=tree, temperature=0.0)
    found = [row for row in found if data in row["data"] and seconds in (None, row["train_seconds"])]
    assert found, (head, eval_set, tree)
    return float(found[-1]["tau"])


def decode(case: str, card: str, revision: str, **more: Any) -> float:
    found = [row for row in rows("decode_speed", case=case, **more) if card in row["card"]]
    (row,) = (row for row in found if row["git_revision"].startswith(revision))
    return float(row["value"])


def training(case: str, card: str, field: str = "tokens_per_s", **more: Any) -> float:
    found = [row for row in rows("train_speed", case=case, **more) if card in row["card"]]
    return float(found[0][field])  # the first is the one in the table of docs/results/README.md


def scaled(case: str, gpus: int) -> float:
    return 100 * one("scaling", "efficiency", case=case, gpus=gpus)


#: what a table's line begins with → the numbers in its last column, as the files have them
README: dict[str, Callable[[], list[str]]] = {
    "| τ of EAGLE-3 on SmolLM2-135M": lambda: [f"{smollm2('eagle3', 'spec_bench', 'tree60'):.2f}"],
    "| speed-up of an earlier head": lambda: [
        f"{decode('smollm2_speedup', 'H200', '1289375', tree='tree16', levels=5, k=4):.2f} ×"
    ],
    "| speed-up by the clock at batch 32": lambda: [f"{fixed('eagle3', 32):.2f}, {fixed('dspark', 32):.2f} ×"],
    "| speed-up at Llama-3.1-8B sizes": lambda: [
        f"{decode('chain3_speedup', 'H100', '74bf34a'):.2f} × (H100)",
        f"{decode('chain3_speedup', 'H200', '97e1397'):.2f} × (H200)",
    ],
    "| the same with EAGLE-2 trees": lambda: [
        f"{decode('tree60_speedup', 'H100', '74bf34a'):.2f} × (H100)",
        f"{decode('tree60_speedup', 'H200', '97e1397'):.2f} × (H200)",
    ],
    "| greedy output identical": lambda: (
        ["480 of 480"] if one("decode_speed", "identical", case="identity_fp32") == 480 else []
    ),
    "| EAGLE-3 training at": lambda: [f"{training('fixed_all', 'H100', preset='llama-3.1-8b'):,.0f} tokens/s"],
    "| training on live features on four H200s": lambda: [
        ", ".join(f"{scaled(case, 4):.0f}" for case in ("ddp", "fsdp2", "zero2", "zero3", "fsdp2_target")) + " % each"
    ],
}


def table_line(page: str, begins: str) -> str:
    lines = [line for line in (ROOT / page).read_text().splitlines() if line.startswith(begins)]
    assert len(lines) == 1, f"{page}: {len(lines)} lines begin with {begins!r}"
    return lines[0]


@pytest.mark.parametrize("begins", README)
def test_the_readme_says_what_was_measured(begins: str) -> None:
    last = table_line("README.md", begins).split("|")[-2].replace("*", "")
    expected = README[begins]()
    assert expected and all(number in last for number in expected), (last, expected)


def test_every_line_of_the_readmes_results_is_tested() -> None:
    text = (ROOT / "README.md").read_text()
    table = text[text.index("| what | measured |") :].split("\n\n")[0].splitlines()[2:]
    assert all(any(line.startswith(begins) for begins in README) for line in table)
    assert len(text.splitlines()) <= 150
    assert "headstart eval --head yuhuili/EAGLE3-LLaMA3.1-Instruct-8B" in text


GREEDY = "smollm2_answers.jsonl.gz"


def test_other_pages_say_what_was_measured() -> None:
    h100 = (ROOT / "docs/walkthrough-h100.md").read_text()
    for case in ("fixed_all", "online_all"):
        assert f"{training(case, 'H100', preset='llama-3.1-8b'):,.0f}" in h100, case
    (row,) = (row for row in rows("smollm2") if "H200" not in row["card"] and "H100" not in row["card"])
    assert f"τ of {row['tau']:.2f}" in (ROOT / "docs/quickstart.md").read_text()


#: line of choosing.md → (head, chain, data) of smollm2.json
CHOICE = {
    "| DSpark, 2 layers": ("dspark", "chain7"),
    "| DFlash, 4 layers": ("dflash", "chain7"),
    "| P-EAGLE, 2 layers": ("peagle", "chain7"),
    "| Hydra++": ("hydrapp", "chain4"),
    "| Hydra |": ("hydra", "chain4"),
    "| Medusa-1, low rank": ("medusa", "chain4"),
    "| EAGLE-3, normed features, Muon, output near": ("eagle3", "chain5"),
    "| EAGLE-3, normed features, Muon (14,433 steps": ("eagle3", "chain5"),
    "| EAGLE-3 as published (5,325 steps": ("eagle3", "chain5"),
    "| EAGLE-1 (9,250 steps)": ("eagle", "chain5"),
}


@pytest.mark.parametrize("begins", CHOICE)
def test_the_choice_of_heads_names_measured_lengths(begins: str) -> None:
    head, tree = CHOICE[begins]
    cells = [cell.strip(" *") for cell in table_line("docs/choosing.md", begins).split("|")]
    for cell, prompts in zip(cells[3:5], ("tau_check/spec_bench", "tau_check/unseen_mix"), strict=True):
        found = [row for row in rows("smollm2", head=head, eval_set=prompts, tree=tree) if row["data"] == GREEDY]
        told = {f"{row['tau']:.2f}" for row in found}
        if "output near" in begins:
            told = {f"{row[prompts.replace('tau_check/', 'tau_')]:.2f}" for row in rows("ablations", cell="wide-s0")}
        assert cell in told, (begins, prompts, told)


def test_the_rules_of_thumb_name_measured_numbers() -> None:
    page = (ROOT / "docs/choosing.md").read_text().split("## Three rules of thumb")[1].split("\n## ")[0]
    numbers = set(re.findall(r"(?<![\d.])\d\.\d\d(?!\d)", page))
    measured = (ROOT / "docs/results/README.md").read_text()
    assert len(numbers) >= 12 and not {number for number in numbers if number not in measured}


@pytest.mark.parametrize(
    ("begins", "head"), [("| EAGLE-3 | 1", "eagle3"), ("| DSpark | 1", "dspark"), ("| Medusa-1 | 0", "medusa")]
)
def test_the_choice_of_heads_names_measured_speed_ups(begins: str, head: str, draw: ModuleType) -> None:
    cells = [cell.strip() for cell in table_line("docs/choosing.md", begins).split("|")[2:6]]
    best = [draw.best_fixed(head, batch) for batch in (1, 8, 32, 64)]
    assert cells == [f"{row['speedup']:.2f} × ({draw.draft_in_words(row['tree'])})" for row in best]


def test_the_choice_of_heads_names_measured_costs() -> None:
    block = {"block": 7, "draft_vocab": 32000}
    h200 = "H200"
    expected = {
        "| EAGLE-3, draft vocabulary": [
            f"{training('fixed_all', h200, preset='llama-3.1-8b'):,.0f} tokens/s",
            f"{training('fixed_all', h200, 'peak_gib', preset='llama-3.1-8b'):.1f} GiB",
            f"{decode('frontier_ms', h200, '97e1397'):.2f} ms",
        ],
        "| DSpark, 5 layers": [
            f"{training('dspark_all', h200, **block):,.0f} tokens/s",
            f"{training('dspark_all', h200, 'reserved_gib', **block):.1f} GiB",
            f"{decode('dspark_block7_ms', h200, '1289b74', draft_vocab=32000):.2f} ms",
        ],
        "| DFlash, 5 layers": [
            f"{training('dflash_all', h200, **block):,.0f} tokens/s",
            f"{training('dflash_all', h200, 'reserved_gib', **block):.1f} GiB",
            f"{decode('dflash_block7_ms', h200, '1289b74', draft_vocab=32000):.2f} ms",
        ],
        "| Medusa-1, 5 heads": [
            f"{training('medusa_all', h200):,.0f} tokens/s",
            f"{training('medusa_all', h200, 'reserved_gib'):.1f} GiB",
        ],
    }
    for begins, numbers in expected.items():
        line = table_line("docs/choosing.md", begins)
        assert all(number in line for number in numbers), (line, numbers)


ENGINES = {
    "vllm": "vLLM", "sglang": "SGLang", "tensorrt_llm": "TensorRT-LLM", "tgi": "TGI", "llama_cpp": "llama.cpp",
}  # fmt: skip


def test_the_choice_of_heads_names_the_engines_that_load_them(tiny_target: Path, tmp_path: Path) -> None:
    from headstart.hardware import hardware_of
    from headstart.heads.targets.load import weightless_target
    from headstart.heads.targets.target import TargetConfig
    from headstart.initial import basic_settings, candidates, look_at

    data = tmp_path / "talk.jsonl"
    data.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n')
    target = weightless_target(TargetConfig(name=str(tiny_target)))
    able, _ = candidates(basic_settings(str(tiny_target), look_at(str(data)), hardware_of("none"), "x"), target)
    engines = {each.family: {ENGINES[key] for key in each.engines} for each in able}
    seen = 0
    for begins, (family, _) in CHOICE.items():
        said = table_line("docs/choosing.md", begins).split("|")[-3].replace("no engine", "").replace("≤ 0.32", "")
        if (known := engines.get("hydra" if family == "hydrapp" else family)) is not None:
            known = known - {"llama.cpp"} if "normed features" in begins else known  # it reads no norm of each stream
            assert {word.strip() for word in said.split(",") if word.strip()} == known, family
            seen += 1
    assert seen >= 5


def test_the_choice_of_heads_names_the_trees_that_they_draft() -> None:
    names = {"static": "static", "chain": "chain", "dynamic": "dynamic", "ddtree": "over marginals"}
    for family in FAMILIES:
        (line,) = (each for each in (ROOT / "docs/choosing.md").read_text().splitlines()
                   if each.startswith("| `") and f"`{family}`" in each.split("|")[1])  # fmt: skip
        said = line.split("|")[-2]
        if "JetSpec" in said:
            said = "chain, over marginals" if family == "jetspec" else "chain"
        assert {word.strip() for word in said.split(",")} == {names[kind] for kind in DRAFTERS[family].kinds}, family


def table_rows(page: str) -> list[list[str]]:
    """The cells of every table row of a text, heads of tables apart."""
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    return [line for line in lines if line[0] != "changed"]


def test_the_table_of_levers_says_what_was_measured() -> None:
    page = (ROOT / "docs/results/README.md").read_text().split("## Levers on two CPU cores")[1].split("\n## ")[0]
    told = table_rows(page)
    measured = [row for row in rows("ablations") if row["card"] != "NVIDIA H200"]
    assert len(told) == len(measured) == 21
    for lever, spec_bench, unseen_mix, seconds in told:
        given = [] if lever == "the recipe" else lever.strip("`").split(" ")
        (row,) = (row for row in measured if settings_of(row) == given)
        for cell, key in ((spec_bench, "tau_spec_bench"), (unseen_mix, "tau_unseen_mix")):
            low, high = row[f"{key}_ci95"]
            assert cell == f"{row[key]:.3f} ({low:.2f}–{high:.2f})"
        assert seconds == f"{row['train_seconds']:.0f}" and row["steps"] == 150


def test_the_tables_of_levers_on_a_gpu_say_what_was_measured() -> None:
    page = (ROOT / "docs/results/README.md").read_text().split("## Levers on one H200")[1].split("\n## ")[0]
    first, *more = page.split("Changes on top of `")
    told = [({}, line) for line in table_rows(first)]
    for part in more:
        base = dict(setting.split("=") for setting in part.split("`")[0].split(" "))
        told += [(base, line) for line in table_rows(part)]
    measured = [row for row in rows("ablations") if row["card"] == "NVIDIA H200"]
    assert len(told) == len(measured) == 32
    for start, (lever, spec_bench, unseen_mix, walked, *steps) in told:
        given = [] if lever == "none" else lever.strip("`").split(" ")
        expected = start | dict(setting.split("=") for setting in given)
        (row,) = (row for row in measured if dict(each.split("=") for each in settings_of(row)) == expected)
        for cell, key in ((spec_bench, "tau_spec_bench"), (unseen_mix, "tau_unseen_mix")):
            low, high = row[f"{key}_ci95"]
            assert cell == f"{row[key]:.2f} ({low:.2f}–{high:.2f})"
        assert walked == f"{row['walked_tau_held_out']:.2f}" and f"{row['steps']:,}" == (*steps, "1,000")[0]


def settings_of(row: Row) -> list[str]:
    """The settings of a row of ablations.json, as overrides."""
    if row["lever"] in ("recipe", "published"):
        return []
    keys = row["lever"].split(", ")
    values = row["value"] if len(keys) > 1 else [row["value"]]
    words = [str(value).lower() if isinstance(value, bool) else str(value).replace(" ", "") for value in values]
    return [f"{key}={word}" for key, word in zip(keys, words, strict=True)]
