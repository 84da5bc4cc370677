"""Parity gate: an EAGLE-3 head drafting in llama.cpp (llama-server, on a CPU) against Headstart's own loop, in float32.

    bash scripts/parity/llama_cpp.sh [--data FILE.jsonl] [--heads DIR] [--limit N] …

The shell script builds llama.cpp. Target and head become GGUF files: the target by llama.cpp's own converter, the head
by our exporter (`export.engines=[llama_cpp]`). Both sides decode the same prompts greedily, one at a time, with a chain
of the same length.

llama-server counts its drafts and their accepted tokens. Where the limit leaves room for one token only, it drafts
nothing and decodes plainly; such a forward is a cycle in Headstart's loop as well. So tau is, on both sides, the tokens
after the first one per forward of the target.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from headstart.eval.measuring.metrics import acceptance
from headstart.heads.errors import ConfigError, HeadstartError
from headstart.heads.formats import ExportConfig, export_head
from headstart.heads.formats.gguf_file import GGUF
from headstart.heads.provenance import git_revision
from headstart.heads.targets.load import load_target
from headstart.heads.targets.target import TargetConfig
from headstart.parity.heads import head_directory
from headstart.parity.serve_vllm import end_of, free_port
from headstart.parity.vllm import (
    TOLERANCE,
    exit_code,
    max_model_len,
    prompt_files,
    read_prompts,
    run_ours,
    save_target,
    say,
    update_rows,
)
from headstart.saved_heads import bound_head

FAMILY = "eagle3"
#: counter of llama-server → key of a row
COUNTERS = {"num_drafts": "drafts", "num_draft_tokens": "draft_tokens", "num_accepted_tokens": "accepted"}
START_SECONDS = 180


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        prog="parity/llama_cpp.sh", description="Compare an EAGLE-3 head in llama.cpp with Headstart's own loop."
    )
    options.add_argument("--target", default="smollm2-135m-instruct", help="registered name or directory")
    options.add_argument("--data", type=Path, nargs="+", default=None, help="JSONL of prompts")
    options.add_argument("--heads", type=Path, default=None, help="DIR/eagle3 holds the head; default: train here")
    options.add_argument("--recipe", default="quickstart", help="recipe whose data and sizes train the head")
    options.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of that recipe")
    options.add_argument("--depth", type=int, default=3, help="length of the chain")
    options.add_argument("--limit", type=int, default=None, help="first prompts only")
    options.add_argument("--max-new-tokens", type=int, default=64)
    options.add_argument("--threads", type=int, default=1, help="of llama-server")
    options.add_argument(
        "--llama-cpp", type=Path, default=os.environ.get("PARITY_LLAMA_CPP"), help="folder with its source and build"
    )
    options.add_argument("--work", type=Path, default=Path("runs/parity_llama_cpp"), help="heads, exports and logs")
    options.add_argument("--out", type=Path, default=None, help="results (default: WORK/parity_llama_cpp.json)")
    options.set_defaults(joint=False, small=None)
    return options


def compare(arguments: argparse.Namespace) -> int:
    """Returns 0 when every set of prompts passes, 1 otherwise."""
    server = None if arguments.llama_cpp is None else Path(arguments.llama_cpp) / "build/bin/llama-server"
    if server is None or not server.is_file():
        raise ConfigError(
            f"--llama-cpp: found {arguments.llama_cpp!r}, expected a folder with llama.cpp's source and build; "
            "bash scripts/parity/llama_cpp.sh makes one"
        )
    target = load_target(TargetConfig(name=arguments.target, dtype="float32", device="cpu"))
    arguments.work.mkdir(parents=True, exist_ok=True)
    place = as_gguf(save_target(target, arguments.work / "target"), Path(arguments.llama_cpp))
    exported = arguments.work / "export"
    head = bound_head(head_directory(FAMILY, target, arguments), target, torch.float32)
    export_head(head, exported, ExportConfig(["llama_cpp"], "float32"), {"target": target.fingerprint()})
    drafting = bound_head(exported, target, torch.float32)
    passed = True
    for path in prompt_files(arguments):
        prompts = read_prompts(path, arguments.limit, target)
        ours = run_ours(drafting, target, prompts, arguments)
        with llama_server(server, place, exported / GGUF, max_model_len(prompts, arguments), arguments) as url:
            theirs = [complete(url, prompt, arguments.max_new_tokens) for prompt in prompts]
            counted = counters(url)
        found = row([answer.tokens for answer in ours], [c for a in ours for c in a.cycles], theirs, counted)
        found |= {
            "chain": arguments.depth, "target": arguments.target, "dtype": "float32",
            "engine_version": version_of(server),
            "command": "bash scripts/parity/llama_cpp.sh " + shlex.join(sys.argv[1:]),
            "git_revision": git_revision(),
        }  # fmt: skip
        out = arguments.out or arguments.work / "parity_llama_cpp.json"
        update_rows(out, {"head": FAMILY, "data": path.name, **found})
        say(json.dumps(found))
        passed = passed and found["passed"]
    return 0 if passed else 1


def row(
    ours: Sequence[Sequence[int]], cycles: Sequence[Any], theirs: Sequence[Sequence[int]], counted: dict[str, Any]
) -> dict[str, Any]:
    """The comparison of both sides.

    Args:
        ours, theirs: tokens of each answer. cycles: of all our answers.
        counted: see `counters`.
    """
    here = acceptance(cycles)
    after_first = sum(max(len(tokens) - 1, 0) for tokens in theirs)
    plain = max(after_first - counted["drafts"] - counted["accepted"], 0)
    forwards = counted["drafts"] + plain
    there = after_first / forwards if forwards else 1.0
    equal = sum(list(a) == list(b) for a, b in zip(ours, theirs, strict=True))
    off = abs(here.tau - there) / here.tau
    return {
        "prompts": len(ours),
        "tokens": sum(map(len, ours)),
        "outputs_equal": equal == len(ours),
        "identical_sequences": equal,
        "tau_ours": here.tau,
        "tau_engine": there,
        "per_position_ours": here.per_position,
        "per_position_engine": [count / forwards for count in counted["per_position"]] if forwards else [],
        "relative_difference": off,
        "engine_counters": counted,
        "plain_forwards": plain,
        "passed": equal == len(ours) and off <= TOLERANCE,
    }


def as_gguf(directory: Path, llama_cpp: Path) -> Path:
    """The target as a float32 GGUF file beside its directory, written by llama.cpp's converter."""
    place = directory.with_suffix(".gguf")
    if not place.is_file():
        source = llama_cpp.resolve() / "source"
        environment = {**os.environ, "PYTHONPATH": f"{source / 'gguf-py'}:{llama_cpp.resolve() / 'tools'}"}
        command = [sys.executable, str(source / "convert_hf_to_gguf.py"), str(directory), "--outtype", "f32"]
        done = subprocess.run([*command, "--outfile", str(place)], env=environment, capture_output=True, text=True)
        if done.returncode or not place.is_file():
            raise HeadstartError(f"convert_hf_to_gguf.py ended with status {done.returncode}:\n{done.stderr[-2000:]}")
    return place


@contextmanager
def llama_server(server: Path, target: Path, head: Path, context: int, arguments: argparse.Namespace) -> Iterator[str]:
    """llama-server with the head, as long as the block runs. Yields: its address."""
    port, log = free_port(), arguments.work / "llama-server.log"
    command = [str(server), "-m", str(target), "-md", str(head), "--spec-type", "draft-eagle3"]
    command += ["--spec-draft-n-max", str(arguments.depth), "--spec-draft-p-min", "0", "-c", str(context), "-np", "1"]
    command += ["-ctk", "f32", "-ctv", "f32", "-ctkd", "f32", "-ctvd", "f32", "-t", str(arguments.threads), "--metrics"]
    url = f"http://127.0.0.1:{port}"
    with open(log, "w") as out:
        process = subprocess.Popen([*command, "--host", "127.0.0.1", "--port", str(port)], stdout=out, stderr=out)
    try:
        began = time.monotonic()
        while not healthy(url):
            if process.poll() is not None or time.monotonic() - began > START_SECONDS:
                raise HeadstartError(f"llama-server does not answer; see {log}:\n{end_of(log)}")
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=30)


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as reply:
            return reply.status == 200
    except OSError:
        return False


def complete(url: str, prompt: list[int], max_new_tokens: int) -> list[int]:
    """The greedy answer to a prompt, its stop token included."""
    body = {
        "prompt": prompt, "n_predict": max_new_tokens, "temperature": 0, "samplers": ["top_k"], "top_k": 1,
        "cache_prompt": False, "return_tokens": True,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as reply:
        return list(json.load(reply)["tokens"])


def counters(url: str) -> dict[str, Any]:
    """llama-server's counters: drafts, draft_tokens, accepted, and per_position (accepted tokens)."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as reply:
        return read_counters(reply.read().decode())


def read_counters(text: str) -> dict[str, Any]:
    """Args: text: of /metrics."""
    found: dict[str, Any] = dict.fromkeys(COUNTERS.values(), 0)
    for name, key in COUNTERS.items():
        if match := re.search(rf"^llamacpp:spec_decode_{name}_total (\d+)", text, re.M):
            found[key] = int(match[1])
    name = "llamacpp:spec_decode_num_accepted_tokens_per_pos_total"
    per_position = re.findall(rf'^{name}{{position="\d+"}} (\d+)', text, re.M)
    return {**found, "per_position": [int(count) for count in per_position]}


def version_of(server: Path) -> str:
    said = subprocess.run([str(server), "--version"], capture_output=True, text=True)
    match = re.search(r"version: (.*)", said.stdout + said.stderr)
    return f"llama.cpp {match[1] if match else 'unknown'}"


def main() -> int:
    return exit_code(compare, parser())


if __name__ == "__main__":
    sys.exit(main())
