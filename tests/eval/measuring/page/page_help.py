"""Reports with everything and with nothing in them, and a page taken apart."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

from headstart.eval.measuring.report import Report, Section

#: markup, quotes, control and direction characters, a formula, what looks like a template
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>&amp;\"'</pre></title>\x1b[31m\u202e$x_1$ {{ 7 * 7 }}"
SEEN = HOSTILE.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e")


def section(tau: float, speedup: float | None, prompts: int = 2) -> Section:
    ci = None if speedup is None else [speedup - 0.125, speedup + 0.25]
    return Section(
        prompts, 10, 20, tau, [tau - 0.25, tau + 0.5], [0.625, 0.375], [0.625, 0.6], 10.5, 5.25, speedup,
        speedup_ci95=ci, identity={"sequences": prompts, "identical": prompts - 1},
    )  # fmt: skip


def latency(first: float, token: float) -> dict[str, float]:
    return {
        "first_token_p50_ms": first, "first_token_p95_ms": first + 0.5, "token_p50_ms": token, "token_p95_ms": token + 1
    }  # fmt: skip


def point(name: str, value: int, gain: float) -> dict[str, Any]:
    return {
        name: value, "rows": 4 * value, "prompts": 4, "baseline_tokens_per_s": 100.5 * value, "tau": 2.25,
        "speculative_tokens_per_s": 100.5 * value * gain, "speedup": gain, "row_speedup": gain + 0.0625,
        "tau_ci95": [2.0, 2.5],
    }  # fmt: skip


SAMPLES = [
    {
        "task": "writing", "prompt": "user\nSay hello.\nassistant\n", "first": "Hello", "tau": 2.0,
        "finish_reason": "stop",
        "cycles": [
            {"drafted": 3, "accepted": [",", " my"], "rejected": [" friend"], "own": " dear"},
            {"drafted": 3, "accepted": [], "rejected": [" friend", "!", "\n"], "own": " reader"},
            {"drafted": 3, "accepted": [".", "\n", "<|end|>"], "rejected": [], "own": None},
        ],
    }
]  # fmt: skip
CURVES = {
    "lr": [[2, 1e-4], [4, 2e-4], [6, 5e-5]],
    "train/loss": [[2, 9.5], [4, 8.25], [6, 7.125]],
    "train/acc_1": [[2, 0.125], [4, 0.25], [6, 0.5]],
    "train/acc_2": [[2, 0.0625], [4, 0.125], [6, 0.375]],
    "train/walked_tau": [[2, 1.125], [4, 1.5], [6, 1.875]],
    "valid/loss_1": [[4, 4.5], [6, 4.25]],
    "valid/loss_2": [[4, 5.5], [6, 5.125]],
    "valid/walked_tau": [[4, 1.375], [6, 1.75]],
    "valid/tau": [[4, 1.4375], [6, 1.8125]],
}


def whole(**changes: Any) -> Report:
    """A report with every section."""
    made = Report(
        target={"name": "smollm2-135m-instruct"}, drafter="eagle3", dtype="bfloat16", device="a card",
        head={"type": "eagle3", "parameters": 1234567, "path": "a local head"},
        data={"path": "own data", "sha256": "0123456789abcdef0123"}, temperature=0.0, lossless=True,
        tree={"kind": "chain", "depth": 3, "label": "chain3"}, batch_size=1, max_new_tokens=9,
        prompts=6, forwards=20, tokens=50, tau=2.5, tau_ci95=[2.25, 2.75],
        per_position_acceptance=[0.75, 0.5, 0.25], per_position_conditional=[0.75, 0.667, 0.5],
        baseline_tokens_per_s=100.0, tokens_per_s=180.0, speedup=1.8, speedup_ci95=[1.625, 1.9375],
        tasks={"writing": section(2.0, 1.5), "math": section(3.0, 2.0, 3), "chat": section(1.5, None, 1)},
        greedy_identity={
            "dtype": "bfloat16", "sequences": 6, "identical": 5,
            "divergences": [{"id": "own data:3", "turn": 0, "position": 7, "gap": 0.015625}],
        },
        timing={"ready_s": 2.0}, sampling={"top_k": 0, "seed": 1}, recipe={"name": "x", "eval": {"limit": 6}},
        versions={"torch": "2.11", "headstart": "0.1.0"}, git_revision="abc123", notes=["a note"],
        latency={"baseline": latency(8, 10), "speculative": latency(9, 5)}, device_type="cuda",
        cycle={"draft_ms": 1.25, "verify_ms": 5.5, "rest_ms": 0.375}, chain_speedups={"1": 1.25, "2": 1.625, "3": 1.8},
        sweeps={
            "batch": {"points": [point("batch", 1, 1.75), point("batch", 4, 1.5), point("batch", 16, 0.875),
                                 {"batch": 64, "out_of_memory": True}],
                      "gain_ends": 16, "says": "the gain ends at batch 16"},
            "context": {"points": [point("context", 512, 1.5), point("context", 4096, 1.25)], "note": "repeated"},
        },
        samples=SAMPLES,
        training={
            "curves": CURVES, "steps": 6, "seconds": 90.5,
            "data": {"train": {"conversations": 205, "tokens": 28957},
                     "statistics": {"samples": 205, "length": {"median": 142}, "own_choice": {"share": 0.9921}}},
        },
        verdict={
            "pays": True, "says": ["It pays on a card."], "next": ["Draft a chain of 3."], "tokens": 3, "speedup": 1.8,
            "speedup_ci95": [1.625, 1.9375], "batch_size": 1,
        },
        command="headstart eval RECIPE.yaml",
    )  # fmt: skip
    return replace(made, **changes)


#: fields that a report may lack, as those of earlier versions and of servers do
OPTIONAL = ("cycle", "sweeps", "chain_speedups", "samples", "training", "verdict", "latency", "command", "speedup",
            "speedup_ci95", "tau_ci95", "greedy_identity", "head", "device_type", "engine_path", "cut")  # fmt: skip


def bare(**changes: Any) -> Report:
    """A report without everything that may be missing."""
    empty = {name: None for name in OPTIONAL}
    lacking: dict[str, Any] = {
        **empty, "tasks": {}, "per_position_acceptance": [], "per_position_conditional": [], "notes": [], "recipe": {},
        "tokens_per_s": None, "baseline_tokens_per_s": None, "timing": {}, "sampling": {}, "versions": {},
    }  # fmt: skip
    return whole(**{**lacking, **changes})


def hostile() -> Report:
    """Every text that others may have written holds markup."""
    sample = {
        "task": HOSTILE, "prompt": HOSTILE, "first": HOSTILE, "tau": 1.5, "finish_reason": "stop",
        "cycles": [{"drafted": 2, "accepted": [HOSTILE], "rejected": [HOSTILE, HOSTILE], "own": HOSTILE}],
    }  # fmt: skip
    return whole(
        target={"name": HOSTILE}, drafter=HOSTILE, device=HOSTILE, dtype=HOSTILE, data={"path": HOSTILE},
        tree={"label": HOSTILE}, tasks={HOSTILE: section(2.0, 1.5), "b": section(2.0, 1.0)}, notes=[HOSTILE],
        recipe={"name": HOSTILE, HOSTILE: [HOSTILE]}, versions={HOSTILE: HOSTILE}, samples=[sample], command=HOSTILE,
        git_revision=HOSTILE, head={"type": HOSTILE, "path": HOSTILE}, engine_note=HOSTILE,
        verdict={"pays": None, "says": [HOSTILE], "next": [HOSTILE]},
        training={"curves": {HOSTILE: [[1, 1.0], [2, 2.0]], **CURVES}},
        greedy_identity={"dtype": "f", "sequences": 1, "identical": 0,
                         "divergences": [{"id": HOSTILE, "turn": 0, "position": 1, "gap": 0.5}]},
    )  # fmt: skip


class Page(HTMLParser):
    """Attributes: tags: every element with its attributes. tables: caption → rows → (text, value). text: all of it."""

    def __init__(self, html: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tables: dict[str, list[list[tuple[str, float | None]]]] = {}
        self.text = ""
        self._inside: list[str] = []
        self._cell: tuple[str, str | None] | None = None
        self._caption = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.append((tag, values))
        self._inside.append(tag)
        if tag == "caption":
            self._caption = ""
        if tag == "tr":
            self.tables[self._caption].append([])
        if tag in ("th", "td"):
            self._cell = "", values.get("data-value")

    def handle_endtag(self, tag: str) -> None:
        while self._inside and self._inside.pop() != tag:
            pass
        if tag == "caption":
            self.tables[self._caption] = []
        if tag in ("th", "td") and self._cell is not None:
            text, value = self._cell
            self.tables[self._caption][-1].append((text, None if value is None else float(value)))
            self._cell = None

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self._inside[-1:]):
            self.text += data
        if "caption" in self._inside[-1:]:
            self._caption += data
        elif self._cell is not None:
            self._cell = self._cell[0] + data, self._cell[1]

    def table(self, start: str) -> dict[str, dict[str, tuple[str, float | None]]]:
        """Row header → column → (text, value) of the table whose caption starts so."""
        ((head, *rows),) = [rows for caption, rows in self.tables.items() if caption.startswith(start)]
        return {row[0][0]: dict(zip((name for name, _ in head), row, strict=True)) for row in rows}

    def ids(self) -> list[str]:
        return [str(values["id"]) for _, values in self.tags if "id" in values]
