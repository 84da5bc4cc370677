"""What preparing data costs: tokenising with masks, memory, and whether kills and templates leave it right.

    python -m headstart.bench.data --data answers.jsonl --out docs/results/data_speed.json
    python -m headstart.bench.data --data prompts.jsonl --cases distil_tokens_per_s --out docs/results/data_speed.json

Cases:

    tokenise_ratio         rate of conversations → token ids with masks, as a share of the rate of the tokenizer's own
                           `encode_batch` on the same texts. The conversations of `--data` are taken alone, 4 in one and
                           40 in one; each way is measured in turn, `--rounds` times, and its best round counts. Once
                           with one thread (TOKENIZERS_PARALLELISM=false), once with as many as there are
    stream_peak_gib        largest resident memory of a process that prepares `--conversations` conversations (5 records
                           of `--data` each, drawn at random) from a JSONL file
    kill_points_ok         after how many of 20 kills (kill -9) of a distillation the run that went on ended right: in
                           process, and through a server
    template_families_ok   model families of which all masks are right (tests/data/templates)
    distil_tokens_per_s    see headstart.bench.distil, whose arguments are taken as well
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from headstart.bench import distil
from headstart.bench.kill_points import kill_points
from headstart.bench.timing import add_rows
from headstart.data.config import DataConfig, SourceConfig
from headstart.data.encoding import Encoder
from headstart.data.prepare import prepare, tokenize
from headstart.data.prompts import Chats
from headstart.data.records.conversation import Conversation
from headstart.data.sources.sources import load_conversations
from headstart.heads.errors import DataError
from headstart.heads.host_memory import peak_bytes
from headstart.heads.provenance import command_line, provenance
from headstart.heads.targets.fetch import fetch_target

HERE = ("tokenise_ratio", "stream_peak_gib", "kill_points_ok", "template_families_ok")
#: records of the data that make one conversation, for the ratio
JOINED = (1, 4, 40)
#: records that make one streamed conversation
STREAMED = 5
KILLS = 20
#: tests of the checkout that are run for what they prove
SERVER_KILLS = "tests/data/serving/test_kills.py"


@dataclass
class DataRecord:
    """One measurement: a row of docs/results/data_speed.json.

    Attributes:
        details: what else describes the measurement; `way` tells rows of one case apart.
    """

    case: str
    value: float
    unit: str
    card: str
    command: str
    git_revision: str
    details: dict[str, Any] = field(default_factory=dict)


@cache
def origin_of_rows() -> dict[str, Any]:
    """Asked before the first measurement: what is edited while it goes on is not what is measured."""
    return provenance("cpu")


def record(case: str, value: float, unit: str, **details: Any) -> DataRecord:
    origin = origin_of_rows()
    return DataRecord(case, value, unit, origin["device"], command_line(), origin["git_revision"], details)


def messages_of(path: Path, limit: int | None) -> list[tuple[dict[str, Any], ...]]:
    """The messages of each answered conversation. Raises: DataError for a file without any."""
    rows = load_conversations([SourceConfig(path=str(path), limit=limit)])
    found = [row.messages for row in rows if any(message["role"] == "assistant" for message in row.messages)]
    if not found:
        raise DataError(f"--data {path}: found no conversation with an answer, expected some")
    return found


def joined(rows: Sequence[tuple[dict[str, Any], ...]], size: int) -> list[Conversation]:
    """Conversations of `size` records each, one after another."""
    groups = [rows[first : first + size] for first in range(0, len(rows) - size + 1, size)]
    return [Conversation(str(n), tuple(message for row in group for message in row)) for n, group in enumerate(groups)]


def tokenise_ratio(
    tokenizer: Any, stops: Sequence[int], rows: Sequence[tuple[dict[str, Any], ...]], rounds: int, threads: bool
) -> DataRecord:
    """The time of `encode_batch` for all texts, divided by that of `tokenize` for all conversations."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads else "false"
    config, shapes = DataConfig(max_length=1 << 30), {}
    batch_s, ours_s = 0.0, 0.0
    for size in JOINED:
        conversations = joined(rows, size)
        chat = Chats(tokenizer, stops)
        texts = [chat.of(row).render(row.messages) for row in conversations]
        core, best = tokenizer.backend_tokenizer, [float("inf"), float("inf")]
        for number in range(rounds):
            began = time.perf_counter()
            encodings = core.encode_batch(texts, add_special_tokens=False)
            between = time.perf_counter()
            if number == 0:
                require_same(encodings, conversations, Encoder(tokenizer, stops, config))
            tokens = sum(map(len, encodings))
            del encodings
            again = time.perf_counter()
            tokenize(conversations, tokenizer, config, stops)
            best = [min(best[0], between - began), min(best[1], time.perf_counter() - again)]
        shapes[size] = {
            "conversations": len(conversations), "tokens": tokens, "encode_batch_tokens_per_s": round(tokens / best[0]),
            "tokens_per_s": round(tokens / best[1]), "ratio": round(best[0] / best[1], 3),
        }  # fmt: skip
        batch_s, ours_s = batch_s + best[0], ours_s + best[1]
    way, name = "all threads" if threads else "one thread", tokenizer.name_or_path.rpartition("/")[2]
    return record(
        "tokenise_ratio", batch_s / ours_s, "share of encode_batch's rate", way=way, cores=os.cpu_count(),
        rounds=rounds, tokenizer=name, records_joined=shapes,
    )  # fmt: skip


def require_same(encodings: Sequence[Any], conversations: Sequence[Conversation], encode: Encoder) -> None:
    """Raises: DataError where the two ways give other tokens, which no comparison of their times would show."""
    for encoding, (conversation, made) in zip(encodings, encode(conversations), strict=True):
        if isinstance(made, str) or [sample[0].tolist() for sample in made] != [encoding.ids]:
            raise DataError(f"conversation {conversation.id}: found other tokens than encode_batch's, expected those")


def write_stream(rows: Sequence[tuple[dict[str, Any], ...]], count: int, path: Path, seed: int = 0) -> None:
    """`count` conversations of STREAMED records each, drawn at random."""
    generator = random.Random(seed)
    with path.open("w") as file:
        for number in range(count):
            said = [message for row in generator.sample(rows, STREAMED) for message in row]
            file.write(json.dumps({"id": f"c{number}", "messages": said}) + "\n")


def stream_peak(rows: Sequence[tuple[dict[str, Any], ...]], count: int, tokenizer: str, folder: Path) -> DataRecord:
    """The peak of a process of its own. The parent's memory does not count."""
    path = folder / "stream.jsonl"
    write_stream(rows, count, path)
    words = [sys.executable, "-m", "headstart.bench.data", "--prepare", str(path), "--tokenizer", tokenizer]
    made = subprocess.run(words, capture_output=True, text=True)
    if made.returncode:
        raise DataError(f"{path}: preparing it failed: {made.stderr.strip().splitlines()[-1:]}")
    found = json.loads(made.stdout.splitlines()[-1])
    peak = found.pop("peak_gib")
    return record("stream_peak_gib", peak, "GiB", conversations=count, file_gib=path.stat().st_size / 2**30, **found)


def prepare_alone(path: Path, name: str) -> dict[str, Any]:
    """What it takes to prepare a file in this process: the peak of resident memory, of it before, and seconds."""
    tokenizer, stops = tokenizer_of(name)
    before, began = peak_gib(), time.perf_counter()
    data = prepare(DataConfig(sources=[SourceConfig(path=str(path))]), tokenizer, stops)
    return {
        "peak_gib": peak_gib(), "before_gib": before, "seconds": time.perf_counter() - began,
        "tokens": data.report.tokens, "samples": len(data.train) + len(data.held_out),
    }  # fmt: skip


def peak_gib() -> float:
    return peak_bytes() / 2**30


def tokenizer_of(name: str) -> tuple[Any, tuple[int, ...]]:
    """A tokenizer from a folder or of a target that is fetched by its name, and the tokens that end its answers."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name if Path(name).is_dir() else fetch_target(name))
    return tokenizer, (tokenizer.eos_token_id,)


def kills_ok(folder: Path) -> Iterator[DataRecord]:
    """In process, and through a server (a test of the checkout, which kills 20 times)."""
    kills = kill_points(KILLS, 0, folder)
    yield record("kill_points_ok", kills.ok, "kills", way="in process", points=kills.points, faults=kills.faults)
    passed, said = run_test(SERVER_KILLS)
    yield record("kill_points_ok", KILLS if passed else 0, "kills", way="through a server", points=KILLS, test=said)


def families_ok() -> DataRecord:
    """Raises: DataError where the checkout's tests are not there."""
    checking = checkout() / "tests/data"
    sys.path[:0] = [str(checking), str(checking.parent)]
    try:
        from templates.checking import families_ok as check  # type: ignore[import-not-found]
    finally:
        del sys.path[:2]
    found: dict[str, bool] = check()
    wrong = sorted(name for name, right in found.items() if not right)
    return record(
        "template_families_ok", sum(found.values()), "families", of=len(found), families=sorted(found), wrong=wrong
    )


def run_test(name: str) -> tuple[bool, str]:
    """Whether a test of the checkout passes, and pytest's last line."""
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", name]
    made = subprocess.run(words, cwd=checkout(), capture_output=True, text=True)
    return made.returncode == 0, (made.stdout.strip().splitlines() or ["nothing was printed"])[-1]


def checkout() -> Path:
    """The folder of the checkout that this file runs from. Raises: DataError for an installed copy."""
    here = Path(__file__).resolve().parents[2]
    if not (here / "tests").is_dir():
        raise DataError(f"{here}: found no tests, expected a checkout: this case runs some of its tests")
    return here


def bench(arguments: argparse.Namespace) -> Iterator[DataRecord]:
    """Rows of the cases that are asked for, one by one."""
    origin_of_rows()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        for case in arguments.cases:
            if case in ("tokenise_ratio", "stream_peak_gib"):
                rows = messages_of(arguments.data, arguments.limit)
            if case == "tokenise_ratio":
                tokenizer, stops = tokenizer_of(arguments.tokenizer)
                for threads in (False, True):
                    yield tokenise_ratio(tokenizer, stops, rows, arguments.rounds, threads)
            elif case == "stream_peak_gib":
                yield stream_peak(rows, arguments.conversations, arguments.tokenizer, Path(name))
            elif case == "kill_points_ok":
                yield from kills_ok(Path(name))
            elif case == "template_families_ok":
                yield families_ok()


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """Rows with the same key measure the same: the newer one takes the place of the older."""
    return row["case"], row.get("details", {}).get("way"), row.get("batch"), row.get("temperature")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m headstart.bench.data", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=list(HERE), choices=[*HERE, "distil_tokens_per_s"])
    parser.add_argument("--tokenizer", default="smollm2-135m-instruct", help="a target to fetch, or a folder")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--conversations", type=int, default=100_000)
    parser.add_argument("--out", type=Path, help="JSON file that the rows are added to")
    parser.add_argument("--prepare", type=Path, help=argparse.SUPPRESS)
    distil.add_arguments(parser)
    for action in parser._actions:
        if action.dest == "data":
            action.required = False
    arguments = parser.parse_args()
    if arguments.prepare is not None:
        print(json.dumps(prepare_alone(arguments.prepare, arguments.tokenizer)))
        return
    if arguments.data is None and set(arguments.cases) - {"kill_points_ok", "template_families_ok"}:
        parser.error("--data is needed for these cases")
    if "distil_tokens_per_s" in arguments.cases:
        for record in distil.bench(arguments):
            add_rows(arguments.out, [record], key)
    for row in bench(arguments):
        print(f"{row.case}: {row.value:.4g} {row.unit} {row.details}", flush=True)
        add_rows(arguments.out, [row], key)


if __name__ == "__main__":
    main()
