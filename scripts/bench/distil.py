"""How fast a target answers prompts in process: tokens of answers that are written, per second.

    python -m headstart.bench.distil --target smollm2-135m-instruct --data prompts.jsonl --batch 128 256 512

Every batch size warms up first: it makes its buffers, chooses kernels and captures its cycles and prompts of every
length. Then it answers `--answers` prompts, from the first request until the file is closed. Where there are fewer
prompts, they are asked again.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path

from headstart.bench.timing import add_rows
from headstart.data.choosing.asked import read_prompts
from headstart.data.config import DistillConfig, SourceConfig
from headstart.data.distilling.answering import Answer, Answerer, Request, Requests
from headstart.data.distilling.distill import distill
from headstart.data.prompts import Chats, Prompt
from headstart.data.sources.sources import read_jsonl
from headstart.eval.decoding.generation import EngineAnswerer
from headstart.eval.kernels.launch import wake_compiler
from headstart.heads.errors import DataError
from headstart.heads.provenance import command_line, provenance
from headstart.heads.targets.load import load_target, resolve_device
from headstart.heads.targets.target import Target, TargetConfig

#: prompts of a warm-up beyond a full batch, so that rows are filled again
REFILLED = 64


@dataclass(frozen=True)
class DistilRecord:
    """One measurement. `case`, `value`, `unit`, `card`, `command` and `git_revision` are those of every data benchmark.

    Attributes:
        value: tokens of answers per second, from the first request until the file is closed.
        prompts: that differ; answers: how many were written.
        mean_tokens, mean_prompt: tokens of an answer and of a prompt.
        seconds: of answering; written_s: of them, in what is done with finished answers (text, JSON, file). The card
            decodes meanwhile, unless they end faster than they can be written.
        setup_s: of the warm-up before. tokenise_s: of rendering the prompts, which comes before the first request.
    """

    case: str
    value: float
    unit: str
    card: str
    command: str
    git_revision: str
    target: str
    dtype: str
    batch: int
    temperature: float
    max_new_tokens: int
    prompts: int
    answers: int
    mean_tokens: float
    mean_prompt: float
    seconds: float
    written_s: float
    tokenise_s: float
    setup_s: float
    path: str


class Clocked(Answerer):
    """Another answerer, with the times of what goes on outside it.

    Attributes:
        began: when the first request was asked for.
        outside_s: seconds between an answer and the moment at which the next one is asked for.
    """

    def __init__(self, answerer: Answerer):
        self.answerer, self.began, self.outside_s = answerer, 0.0, 0.0

    def answers(self, requests: Requests) -> Iterator[Answer]:
        self.began = time.perf_counter()
        for answer in self.answerer.answers(requests):
            given = time.perf_counter()
            yield answer
            self.outside_s += time.perf_counter() - given


def repeated(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """`count` prompts: the first ones, or all of them several times under names of their own."""
    rounds = [
        prompt if not number else replace(prompt, id=f"{prompt.id}/again{number}")
        for number in range(-(-count // len(prompts)))
        for prompt in prompts
    ]
    return rounds[:count]


def warm_up(answerer: EngineAnswerer, prompts: Sequence[Prompt], target: Target, config: DistillConfig) -> None:
    """Answer a few prompts: buffers for the longest, graphs of every width of a prompt, and full batches."""
    chats, room = Chats(target.tokenizer, target.stop_token_ids), target.positions - config.max_new_tokens
    ids = sorted((tuple(chats.prompt_ids(prompt)) for prompt in prompts), key=len)
    ids = [prompt for prompt in ids if len(prompt) <= room]
    count = config.batch_size + REFILLED
    # the longest is among them, so that the buffers fit all
    chosen = islice(cycle(ids[:: -max(len(ids) // count, 1)]), count)
    requests = [Request(f"warm{number}", 0, prompt, number) for number, prompt in enumerate(chosen)]
    for _ in answerer.answers(Requests(requests)):
        pass


def measure(
    engine: EngineAnswerer, prompts: Sequence[Prompt], config: DistillConfig, answers: int, folder: Path
) -> DistilRecord:
    """Answer `answers` prompts in `folder`, after a warm-up. `config.batch_size` is the number of rows."""
    began, target = time.perf_counter(), engine.target
    engine.decoder.drop_buffers()
    engine.decoder.graphs.clear()
    engine.config = config
    asked = repeated(prompts, answers)
    warm_up(engine, prompts, target, config)
    setup_s = time.perf_counter() - began
    out, clocked, began = folder / f"batch-{config.batch_size}.jsonl", Clocked(engine), time.perf_counter()
    out.unlink(missing_ok=True)
    distill(target, asked, config, out, answerer=clocked)
    seconds, tokenise_s = time.perf_counter() - clocked.began, clocked.began - began
    turns = [turn for _, record in read_jsonl(out) for turn in [*record.get("earlier_turns", []), record]]
    tokens = sum(len(turn["response_token_ids"]) for turn in turns)
    mean_prompt = sum(len(turn["prompt_token_ids"]) for turn in turns) / len(turns)
    origin, decoder = provenance(target.device), engine.decoder
    return DistilRecord(
        "distil_tokens_per_s", tokens / seconds, "tokens/s", origin["device"], command_line(), origin["git_revision"],
        target.config.name, str(target.model.dtype).removeprefix("torch."), config.batch_size, config.temperature,
        config.max_new_tokens, len({prompt.id for prompt in prompts}), len(turns), tokens / len(turns), mean_prompt,
        seconds, clocked.outside_s, tokenise_s, setup_s, decoder.path if decoder.slow is None else decoder.slow,
    )  # fmt: skip


def bench(arguments: argparse.Namespace) -> Iterator[DistilRecord]:
    """A record for each batch size, as soon as it is measured. Raises: DataError for a file without prompts."""
    device = resolve_device(arguments.device)
    if device.type == "cuda":
        wake_compiler()
    target = load_target(TargetConfig(name=arguments.target, device=str(device), dtype=arguments.dtype))
    prompts = read_prompts([SourceConfig(path=str(arguments.data))], arguments.limit)
    if not prompts:
        raise DataError(f"--data {arguments.data}: found no prompts, expected at least one")
    engine: EngineAnswerer | None = None
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for batch in arguments.batch:
            config = DistillConfig(
                max_new_tokens=arguments.max_new_tokens, batch_size=batch, temperature=arguments.temperature,
                top_p=arguments.top_p,
            )  # fmt: skip
            answers = arguments.answers or max(4096, 16 * batch)
            engine = engine or EngineAnswerer(target, config)
            record = measure(engine, prompts, config, answers, Path(folder))
            print(
                f"distil {record.target} {record.dtype} batch {batch}, temperature {record.temperature:g}: "
                f"{record.value:,.0f} tokens/s of {record.answers} answers ({record.mean_tokens:.0f} tokens, prompts "
                f"{record.mean_prompt:.0f}), {record.seconds:.1f} s, writing {record.written_s:.1f} s; before: "
                f"rendering {record.tokenise_s:.1f} s, warm-up {record.setup_s:.1f} s; {record.path}",
                flush=True,
            )
            yield record


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--data", type=Path, required=True, help="prompts, in any layout")
    parser.add_argument("--limit", type=int, help="read so many prompts of it")
    parser.add_argument("--batch", type=int, nargs="+", default=[128, 256, 512], help="rows decoded together")
    parser.add_argument("--answers", type=int, help="answers per batch size; default: 16 per row, at least 4,096")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--folder", type=Path, help="where the answers are written; default: the temporary folder")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m headstart.bench.distil", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument("--out", type=Path, help="JSON file that the rows are added to")
    arguments = parser.parse_args()
    for record in bench(arguments):
        add_rows(arguments.out, [record], lambda row: (row["case"], row.get("batch"), row.get("temperature")))


if __name__ == "__main__":
    main()
