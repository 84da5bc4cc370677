"""Greedy acceptance from one teacher-forced pass, when the target's greedy answers are known.

The answers are fixed, so one batched pass (K passes of a small head) gives what a drafter would draft at *every*
position. The decode loop's cycles follow from it: accept drafts, go to where they end, accept again. τ equals the
loop's exactly, up to rounding ties. A mean over all positions would not: each cycle starts where the last one ended.

    python -m headstart.eval.measuring.teacher_forced --head DIR --target NAME --data tau_check.jsonl --depth 5

prints τ of a float32 greedy chain over records with `prompt_token_ids` and `greedy_token_ids`, one line per `set`.
Shape legend: B documents, T tokens, A roots of a document, K depth, D target hidden, k streams.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from itertools import chain
from pathlib import Path

import torch

from headstart.data.sources.sources import read_jsonl
from headstart.eval.decoding.decode import Cycle
from headstart.eval.drafters import DRAFTERS
from headstart.eval.measuring.metrics import Acceptance, acceptance
from headstart.heads.acceptance import find_cycles
from headstart.heads.base import Head
from headstart.heads.errors import ConfigError
from headstart.heads.targets.target import Target


def teacher_forced_tau(
    target: Target,
    head: Head,
    items: list[tuple[list[int], list[int]]],
    depth: int,
) -> Acceptance:
    """Acceptance of a greedy chain of `depth` over known greedy answers.

    Args:
        items: (prompt token ids, the target's greedy token ids incl. the stop token), as in `tau_check.jsonl`.
    """
    return acceptance(chain.from_iterable(teacher_forced_cycles(target, head, items, depth)))


@torch.inference_mode()
def teacher_forced_cycles(
    target: Target, head: Head, items: list[tuple[list[int], list[int]]], depth: int, max_forward_tokens: int = 8192
) -> list[list[Cycle]]:
    """The decode loop's cycles of each item. Args: max_forward_tokens: padded tokens per batched forward."""
    cycles: list[list[Cycle]] = [[] for _ in items]
    order = sorted((n for n in range(len(items)) if len(items[n][1]) > 1), key=lambda n: sum(map(len, items[n])))
    while order:
        longest = sum(map(len, items[order[-1]]))
        group = [order.pop() for _ in range(min(max(max_forward_tokens // longest, 1), len(order)))]
        drafts = draft_everywhere(target, head, [items[n] for n in group], depth)
        for n, drafts_AK in zip(group, drafts, strict=True):
            cycles[n] = walk(items[n][1], drafts_AK)
    return cycles


def walk(answer: list[int], drafts_AK: list[list[int]]) -> list[Cycle]:
    """Cycles of the decode loop over a known answer; `drafts_AK[a]` is what is drafted after root `answer[a]`."""
    last = len(answer) - 1
    hits = [0] * len(answer)
    for at, drafts in enumerate(drafts_AK[:last]):
        while hits[at] < min(len(drafts), last - at) and drafts[hits[at]] == answer[at + hits[at] + 1]:
            hits[at] += 1
    place = torch.arange(len(answer))
    kept, starts = find_cycles(torch.tensor(hits, dtype=torch.int64), last - place, place == 0)
    return [
        Cycle(len(drafts_AK[at]), min(hits[at], int(kept[at])), int(kept[at]))
        for at in torch.nonzero(starts)[:, 0].tolist()
    ]


def draft_everywhere(
    target: Target, head: Head, items: list[tuple[list[int], list[int]]], depth: int
) -> list[list[list[int]]]:
    """Greedy drafts after every token of every answer but the last: per item, [answer length - 1][≤ depth] ids."""
    drafting = DRAFTERS.get(head.family)
    if drafting is None or drafting.draft_everywhere is None:
        known = [name for name, other in DRAFTERS.items() if other.draft_everywhere is not None]
        raise ConfigError(f"teacher-forced drafts: found a head of the family {head.family}, expected one of {known}")
    documents = [[*prompt, *answer] for prompt, answer in items]
    longest = max(map(len, documents))
    tokens_BT = torch.tensor([doc + [0] * (longest - len(doc)) for doc in documents], device=target.device)
    hidden_BTD, streams = target.forward_documents(tokens_BT, head.spec.layer_ids)
    # root x_{p+1} is drafted for by row p: from the last prompt token to the one before the last root
    first_B1 = torch.tensor([[len(prompt) - 1] for prompt, _ in items], device=target.device)
    count = max(len(answer) for _, answer in items) - 1
    row_BA = (first_B1 + torch.arange(count, device=target.device)).clamp(max=longest - 2)
    streams_BTkD = torch.stack([streams[k] for k in head.spec.layer_ids], 2) if head.spec.layer_ids else None
    drafts_BAK = drafting.draft_everywhere(head, tokens_BT, hidden_BTD, streams_BTkD, row_BA, depth)
    table = drafts_BAK.tolist()
    return [rows[: len(answer) - 1] for rows, (_, answer) in zip(table, items, strict=True)]


def main() -> None:
    from headstart.heads.formats import load_head
    from headstart.heads.targets.load import load_target
    from headstart.heads.targets.target import TargetConfig

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", type=Path, required=True, help="directory of a saved head")
    parser.add_argument("--target", required=True, help="name, directory or Hub id")
    parser.add_argument("--data", type=Path, required=True, help="JSONL with prompt_token_ids and greedy_token_ids")
    parser.add_argument("--depth", type=int, default=5, help="drafts of the chain")
    arguments = parser.parse_args()
    records = [record for _, record in read_jsonl(arguments.data)]
    target = load_target(TargetConfig(name=arguments.target, dtype="float32"))
    head = load_head(arguments.head).float().to(target.device).eval()
    head.bind(target.ends)
    for name in sorted({str(record.get("set", "all")) for record in records}):
        chosen = [record for record in records if str(record.get("set", "all")) == name]
        items = [(record["prompt_token_ids"], record["greedy_token_ids"]) for record in chosen]
        measured = teacher_forced_tau(target, head, items, arguments.depth)
        print(json.dumps({"set": name, "prompts": len(items), **asdict(measured)}), flush=True)


if __name__ == "__main__":
    main()
