"""What Headstart does with every architecture that people serve.

    python -m headstart.bench.targets --out docs/results/targets.json
    python -m headstart.bench.targets --out docs/results/targets.json --equal --device cuda
    python -m headstart.bench.targets --out docs/results/targets.json --only OLMo-2 Qwen3-Next
    python -m headstart.bench.targets --out docs/results/targets.json --missing --markdown docs/targets.md

Each architecture of `headstart.bench.architectures` is asked in a process of its own, so that one which dies or hangs
costs its own row alone. Rows are written as they come. A run on a CPU, one on a GPU and one with `--equal` each fill in
their part of the same rows:

    without --equal   small random models: refusals, features, training, exact decoding plainly, with a chain and with
                      a tree in float32 (on a GPU, the share of exact tokens in bfloat16 too), exports (target_checks)
    with --equal      the cycle of a chain of 3 at the same real widths for all, in bfloat16, acceptance synthetic

`train`, `identity_fp32` and `trees` are true where every machine that was asked says so.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from headstart.bench.architectures import ARCHITECTURES, random_model
from headstart.bench.decode import CHAIN_RATES
from headstart.bench.target_checks import TREES, Effort, Findings, examine, said
from headstart.eval.config import EvalConfig
from headstart.eval.decoding.session import Decoder
from headstart.eval.drafters import build_drafter
from headstart.heads.files import read_json, write_json
from headstart.heads.provenance import command_line, provenance
from headstart.heads.targets.load import resolve_device
from headstart.heads.targets.target import Target, TargetConfig
from headstart.saved_heads import untrained_head

#: where a process writes what it found, and what it printed
RESULT, LOG = "result.json", "log.txt"
#: tokens in the KV buffers before timing, and tokens timed
CONTEXT, TIMED = 256, 128


@dataclass
class Speed:
    """A cycle at real widths.

    Attributes:
        engine_path, generic_because: as Findings.
        cycle_ms: a cycle of a chain of 3: draft, verify, commit; the mean over one answer.
        problems: what went wrong.
    """

    engine_path: str = "none"
    generic_because: str | None = None
    cycle_ms: float | None = None
    problems: list[str] | None = None


def measure_speed(name: str, device: torch.device, size: str = "equal", tokens: int = TIMED) -> Speed:
    """Time a chain of 3 with synthetic acceptance, in bfloat16 on a GPU."""
    speed = Speed(problems=[])
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    try:
        target = Target.from_model(random_model(name, size, device, dtype), config=TargetConfig(name="random"))
        config = EvalConfig(tree=TREES["chain"], synthetic_acceptance=list(CHAIN_RATES))
        decoder = Decoder(target, config)
        noise = torch.Generator().manual_seed(0)
        contexts = torch.randint(3, target.dims.vocab_size, (1, min(CONTEXT, 4 * tokens)), generator=noise).tolist()
        drafter = build_drafter(untrained_head(None, target), config)
        decoder.run(contexts, drafter, 8, seed=0, stop=False)  # chooses kernels and captures the cycle
        cycle_s = decoder.run(contexts, drafter, tokens, seed=0, stop=False).cycle_s
        speed.cycle_ms = round(statistics.mean(cycle_s) * 1e3, 4)
        speed.engine_path, speed.generic_because = decoder.path, decoder.slow
    except Exception as error:
        (speed.problems or []).append(said(error))
    return speed


def work(name: str, equal: bool, device_name: str, half: bool | None, directory: str) -> None:
    """A process: ask one architecture, and write what it did to RESULT in `directory`."""
    place = Path(directory)
    log = os.open(place / LOG, os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if not equal:  # threads that wait for one another cost tiny products more than they gain
        torch.set_num_threads(1)
    device = resolve_device(device_name)
    if equal:
        result: dict[str, Any] = {"kind": "equal", **asdict(measure_speed(name, device))}
    else:
        kind = "gpu" if device.type == "cuda" else "cpu"
        found = examine(name, device, place / "files", Effort(half=kind == "gpu" if half is None else half))
        result = {"kind": kind, **asdict(found)}
    origin = provenance(device)
    result |= {"card": origin["device"], "git_revision": origin["git_revision"], "versions": origin["versions"]}
    write_json(place / RESULT, result)


def ask_all(names: list[str], arguments: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, what `work` wrote) as the processes end, `jobs` of them at a time."""
    # processes come from a server that has imported everything and never touched a GPU
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["headstart.bench.target_checks", "headstart.bench.decode"])
    waiting = list(names)
    running: dict[str, tuple[Any, Path, float]] = {}
    with tempfile.TemporaryDirectory(prefix="headstart-targets-") as root:
        while waiting or running:
            # on a GPU the first one compiles kernels, which the others then find
            alone = arguments.equal or (arguments.device != "cpu" and len(waiting) + len(running) == len(names))
            while waiting and len(running) < (1 if alone else arguments.jobs):
                name = waiting.pop(0)
                place = Path(root) / str(len(names) - len(waiting))
                place.mkdir()
                asked = name, arguments.equal, arguments.device, arguments.half, str(place)
                process = context.Process(target=work, args=asked)
                process.start()
                running[name] = process, place, time.monotonic()
            time.sleep(0.05)
            for name, (process, place, began) in list(running.items()):
                late = time.monotonic() - began > arguments.timeout
                if process.is_alive() and not late:
                    continue
                if process.is_alive():
                    process.kill()
                process.join()
                del running[name]
                yield name, outcome(place, process.exitcode, arguments, late, time.monotonic() - began)


def kind_of(arguments: argparse.Namespace) -> str:
    """Which part of the rows this command fills."""
    return "equal" if arguments.equal else "cpu" if arguments.device == "cpu" else "gpu"


def outcome(place: Path, code: int | None, arguments: argparse.Namespace, late: bool, seconds: float) -> dict[str, Any]:
    """What a process found, or how it ended."""
    if (place / RESULT).is_file():
        result = read_json(place / RESULT)
    else:
        lines = (place / LOG).read_text(errors="replace").splitlines() if (place / LOG).is_file() else []
        last = next((line.strip() for line in reversed(lines) if line.strip()), "nothing was printed")
        how = f"no end after {arguments.timeout:g} s" if late else f"the process ended with code {code}"
        empty = Speed() if arguments.equal else Findings()
        result = {"kind": kind_of(arguments), **asdict(empty), "problems": [f"{how}: {last[:200]}"]}
        result |= {"card": "", "git_revision": "", "versions": {}}
    return {**result, "command": command_line(), "took_s": round(seconds, 1)}


def row_of(name: str, runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The row of an architecture from its runs: `cpu`, `gpu` and `equal`, those that there are.

    The engine's path is the GPU's, where one was asked: kernels are chosen for a GPU.
    """
    tiny = [runs[kind] for kind in ("gpu", "cpu") if kind in runs]
    equal = runs.get("equal", {})
    first = tiny[0] if tiny else equal

    def everywhere(fact: str) -> bool:
        return bool(tiny) and all(run[fact] for run in tiny)

    exports = [set(run["export_engines"]) for run in tiny]
    return {
        "architecture": name,
        "config": ARCHITECTURES[name].config,
        "engine_path": first["engine_path"],
        "train": everywhere("train"),
        "identity_fp32": everywhere("identity_fp32"),
        "trees": everywhere("trees"),
        "refused_before_step_1": any(run["refused"] is not None for run in tiny),
        "identity_bf16": next((run["identity_bf16"] for run in tiny if run["identity_bf16"] is not None), None),
        "cycle_ms": equal.get("cycle_ms"),
        "export_engines": sorted(set.intersection(*exports)) if exports else [],
        "identity_fp32_cpu": runs["cpu"]["identity_fp32"] if "cpu" in runs else None,
        "identity_fp32_gpu": runs["gpu"]["identity_fp32"] if "gpu" in runs else None,
        "note": note_of(runs),
        **{fact: first[fact] for fact in ("card", "git_revision", "versions", "command")},
        "runs": runs,
    }


def note_of(runs: dict[str, dict[str, Any]]) -> str:
    """Why it is refused, generic or without trees, and what failed; each sentence once."""
    said_of: dict[str, list[str]] = {}
    for kind, run in runs.items():
        for label, text in (
            ("refused", run.get("refused")),
            ("generic", run.get("generic_because")),
            ("trees refused", run.get("trees_refused")),
            *(("failed", problem) for problem in run.get("problems") or []),
        ):
            if text:
                said_of.setdefault(f"{label}: {text}", []).append(kind)
    return "; ".join(f"{text} ({', '.join(kinds)})" for text, kinds in said_of.items())


def merge(rows: list[dict[str, Any]], name: str, result: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows in the table's order, with a run of `name` added or replaced."""
    held = {row["architecture"]: row for row in rows}
    runs = dict(held.get(name, {}).get("runs", {}))
    runs[result["kind"]] = {key: value for key, value in result.items() if key != "kind"}
    held[name] = row_of(name, {kind: runs[kind] for kind in ("cpu", "gpu", "equal") if kind in runs})
    return [held[known] for known in ARCHITECTURES if known in held]


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table for the docs. Cycles are also given as multiples of Llama's."""
    llama = next((row["cycle_ms"] for row in rows if row["architecture"] == "Llama"), None)
    head = (
        "| architecture | engine | trains | exact in float32 | trees | exact in bfloat16 | cycle | × Llama | exports |"
    )
    lines = [head, "|---" * 9 + "|"]
    yes = {True: "yes", False: "**no**", None: "–"}
    for row in rows:
        cycle = row["cycle_ms"]
        share = "–" if row["identity_bf16"] is None else f"{row['identity_bf16']:.1%}"
        cells = [
            row["architecture"],
            "refused" if row["refused_before_step_1"] else row["engine_path"],
            yes[row["train"]],
            yes[row["identity_fp32"]],
            yes[row["trees"]] if ARCHITECTURES[row["architecture"]].trees else "chains only",
            share,
            "–" if cycle is None else f"{cycle:.2f} ms",
            "–" if cycle is None or not llama else f"{cycle / llama:.2f}",
            ", ".join(row["export_engines"]) or "–",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def summary(rows: list[dict[str, Any]]) -> str:
    """The rows in three sentences, and where they come from."""
    count = {kind: sum(row["engine_path"] == kind for row in rows) for kind in ("fused", "generic", "none")}
    true = {fact: sum(row[fact] for row in rows) for fact in ("train", "identity_fp32", "trees")}
    text = (
        f"{len(rows)} architectures: {count['fused']} run fused, {count['generic']} by transformers' own forward, "
        f"{count['none']} not at all. {true['train']} train, {true['identity_fp32']} decode exactly in float32, "
        f"{true['trees']} with trees as well."
    )
    ranges = [_range(what, cycles, rows) for what, cycles in _cycles(rows).items() if cycles]
    if ranges:
        text += f" A cycle at equal sizes takes {', '.join(ranges)}."
    return f"{text}\n\n{_origins(rows)}"


def _cycles(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Cycles in ms by how the target ran."""
    found: dict[str, list[float]] = {"fused": [], "generic": [], "with recurrent states": []}
    for row in rows:
        if row["cycle_ms"] is not None:
            states = not ARCHITECTURES[row["architecture"]].trees
            path = "with recurrent states" if states else row["runs"]["equal"]["engine_path"]
            found[path].append(row["cycle_ms"])
    return found


def _range(what: str, cycles: list[float], rows: list[dict[str, Any]]) -> str:
    llama = next((row["cycle_ms"] for row in rows if row["architecture"] == "Llama"), None)
    low, high = min(cycles), max(cycles)
    times = f" ({low / llama:.2f} to {high / llama:.2f} × Llama's)" if llama else ""
    return f"{low:.2f} to {high:.2f} ms {what}{times}"


def _origins(rows: list[dict[str, Any]]) -> str:
    """Machine and revision of every kind of run."""
    names = {"cpu": "small models on a CPU", "gpu": "small models on a GPU", "equal": "cycles at equal sizes"}
    texts = []
    for kind, name in names.items():
        runs = [row["runs"][kind] for row in rows if kind in row["runs"]]
        places = sorted({f"{run['card']}, revision {run['git_revision']}" for run in runs if run["card"]})
        texts += [f"{name}: {' and '.join(places)}"] if places else []
    return f"Measured: {'; '.join(texts)}." if texts else ""


#: what stands between these lines of a page is written anew
BEGIN, END = "<!-- targets table -->", "<!-- end of targets table -->"


def page(rows: list[dict[str, Any]], before: str) -> str:
    """A page with summary and table of the rows between BEGIN and END.

    Args: before: the page as it is; without these lines it is replaced.
    """
    made = f"{summary(rows)}\n\n{markdown(rows)}"
    if BEGIN not in before or END not in before:
        return made
    head, rest = before.split(BEGIN, 1)
    return f"{head}{BEGIN}\n{made}{END}{rest.split(END, 1)[1]}"


def main(words: list[str] | None = None) -> int:
    """Returns 0; 1 where an architecture neither works nor is refused before step 1."""
    parser = argparse.ArgumentParser(
        prog="python -m headstart.bench.targets",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON list that the rows are merged into")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=list(ARCHITECTURES), help="these architectures")
    parser.add_argument("--jobs", type=int, default=2, help="processes side by side; with --equal always one")
    parser.add_argument("--equal", action="store_true", help="time cycles at equal real widths")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument(
        "--half", action=argparse.BooleanOptionalAction, help="decode in bfloat16 as well; by default on a GPU alone"
    )
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds after which a process is ended")
    parser.add_argument("--missing", action="store_true", help="only those whose row has no such run yet")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table of all rows into this page")
    arguments = parser.parse_args(words)
    names = arguments.only or list(ARCHITECTURES)
    rows: list[dict[str, Any]] = read_json(arguments.out) if arguments.out.is_file() else []
    if arguments.missing:
        done = {row["architecture"] for row in rows if kind_of(arguments) in row["runs"]}
        names = [name for name in names if name not in done]
    began, bad = time.monotonic(), 0
    for name, result in ask_all(names, arguments):
        rows = merge(rows, name, result)
        write_json(arguments.out, rows)
        bad += bool(result["problems"])
        print(f"{name:18s} {result['took_s']:6.1f} s  {line_of(result)}", flush=True)
    print(f"{len(names)} architectures in {time.monotonic() - began:.0f} s, {bad} with problems\n\n{markdown(rows)}")
    if arguments.markdown is not None:
        before = arguments.markdown.read_text() if arguments.markdown.is_file() else ""
        arguments.markdown.write_text(page(rows, before))
    return int(bad > 0)


def line_of(result: dict[str, Any]) -> str:
    """What a run found, in a line of the terminal."""
    if result["kind"] == "equal":
        facts = f"{result['engine_path']:8s} cycle {result['cycle_ms']} ms"
    elif result["refused"] is not None:
        facts = f"refused: {result['refused'][:120]}"
    else:
        names = ("features", "train", "identity_fp32", "trees", "identity_bf16", "accepted", "export_engines")
        facts = f"{result['engine_path']:8s} " + json.dumps({fact: result[fact] for fact in names})
    return " | ".join([facts, *result["problems"]])


if __name__ == "__main__":
    sys.exit(main())
