"""The target answers prompts: batched decoding into a JSONL file that a killed run continues.

Which prompts share a batch is fixed before work starts, and every answer has random numbers of its own. So a run that
continues writes what it would have written without the interruption. Finished batches are skipped.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headstart.data.config import DistillConfig
from headstart.data.features import Progress, silent
from headstart.data.media import dropped_for, dropped_lines
from headstart.data.messages import Message
from headstart.data.prompts import Chats, Prompt
from headstart.data.records import Conversation, TokenTurn, parse_record, unread_note
from headstart.data.rendering import RefusedError
from headstart.data.row_random import draw_at, uniforms
from headstart.data.sources import read_jsonl
from headstart.heads.errors import DataError
from headstart.heads.files import explain_disk, read_json, write_json
from headstart.heads.sampling import distribution
from headstart.heads.targets.locate import cache_argument
from headstart.heads.targets.target import Target

#: generator(target, prompts, config, seeds) → answers: see `generate`
Generator = Callable[[Target, Sequence[Sequence[int]], DistillConfig, Sequence[int]], list[list[int]]]


@dataclass
class _Job:
    """One prompt and the answers to its questions; a prompt with several samples has a job for each.

    Attributes:
        first_ids: token ids of the first question.
        stopped: why the later questions were not asked, or None.
    """

    id: str
    prompt: Prompt
    first_ids: list[int]
    seed: int
    answers: list[Message] = field(default_factory=list)
    turns: list[TokenTurn] = field(default_factory=list)
    stopped: str | None = None


def distill(
    target: Target,
    prompts: Sequence[Prompt],
    config: DistillConfig,
    out: Path,
    seed: int = 0,
    progress: Progress = silent,
    template_kwargs: dict[str, Any] | None = None,
    generator: Generator | None = None,
    queued: int = 1,
) -> Path:
    """Answer every prompt (its questions one after another, see `prompt_of`) and append the records to `out`.

    A record holds `id`, `messages`, `sampling`, and of the last turn `prompt_token_ids`, `response_token_ids` and
    `finish_reason`. Turns before it are in `earlier_turns`. The prompt's `tools`, `chat_template_kwargs` and `task` are
    copied. `response_token_ids` ends with the stop token exactly when `finish_reason` is "stop".

    For a later question, an answer is put into the history as the message that `parse_answer` makes of it. Prompts that
    cannot be answered and later questions that cannot be asked are reported through `progress` and listed with their
    reason in `OUT.skipped.json`; the others go on.

    Args:
        generator: decodes prompts; None takes `generate`, which calls the model's own forward.
        queued: batches' worth of prompts that the generator gets at once. They are written, and continued after a kill,
            as one batch.
        config: after `config.max_seconds` no further batch begins; the first one always does.
    Raises: DataError when `out` was made with other settings or prompts, or nothing can be answered;
        StorageError on a full disk.
    """
    config.check()
    out = Path(out)
    chats = Chats(target.tokenizer, target.stop_token_ids, template_kwargs)
    settings = _sampling(target, config, seed, template_kwargs)
    finished = resume(out, prompts, settings, progress)
    jobs, skipped = _make_jobs(chats, target, prompts, config, seed)
    unread = unread_note(Counter(name for prompt in prompts for name in prompt.unread))
    for note in [*chats.notes, *([unread] if unread else [])]:
        progress(0, len(jobs), note)
    held = {prompt.id: (prompt.media, prompt.where) for prompt in prompts if prompt.media is not None}
    for note in dropped_lines(held.values()):
        progress(0, len(jobs), note)
    for name, cause in skipped.items():
        if name not in held:
            progress(0, len(jobs), f"skipped {name}: {cause}")
    if prompts and not jobs:
        name, cause = next(iter(skipped.items()))
        raise DataError(f"distill: none of {len(prompts)} prompts can be answered; the first, {name}: {cause}")
    done = sum(job.id in finished for job in jobs)
    progress(done, len(jobs), f"{done} answers found in {out}" if done else "")
    began, worked = time.monotonic(), False
    together = config.batch_size * queued
    for start in _order(len(jobs), together, config, seed):
        batch = jobs[start : start + together]
        missing = [job for job in batch if job.id not in finished]
        if not missing:
            continue
        if worked and config.max_seconds is not None and time.monotonic() - began >= config.max_seconds:
            over = f"data.distill.max_seconds={config.max_seconds:g} are over: {done} of {len(jobs)} answers"
            progress(done, len(jobs), over)
            break
        worked = True
        # a batch that a kill interrupted runs again as a whole: the same batch gives the same numbers
        answer_batch(target, chats, batch, config, generator or generate)
        _append(out, [_record(job, settings) for job in missing])
        done += len(missing)
        for job in missing:
            if job.stopped is not None:
                skipped[job.id] = job.stopped
                progress(done, len(jobs), f"{job.id}: later turns left out: {job.stopped}")
        progress(done, len(jobs), "")
    place = out.with_name(out.name + ".skipped.json")
    earlier = read_json(place) if place.is_file() else {}
    skipped |= {name: cause for name, cause in earlier.items() if name in finished}  # whose later turns were left out
    if skipped:
        write_json(place, skipped)
    if not out.exists():
        _append(out, [])
    return out


def _make_jobs(
    chats: Chats, target: Target, prompts: Sequence[Prompt], config: DistillConfig, seed: int
) -> tuple[list[_Job], dict[str, str]]:
    """Jobs by length of their first prompt, so that batches hold similar lengths; and why other prompts are skipped."""
    jobs: list[_Job] = []
    skipped: dict[str, str] = {}
    room = _prompt_room(target, config)
    for prompt in prompts:
        if prompt.media is not None:
            skipped[prompt.id] = dropped_for(prompt.media)
            continue
        try:
            ids = chats.prompt_ids(prompt)
        except RefusedError as error:
            skipped[prompt.id] = str(error)
            continue
        if len(ids) > room:
            skipped[prompt.id] = (
                f"{len(ids)} prompt tokens, at most {room} fit (data.distill.max_prompt_tokens, max_new_tokens)"
            )
            continue
        if not ids:
            skipped[prompt.id] = "the prompt has no tokens"
            continue
        if max(ids) >= target.dims.vocab_size:
            skipped[prompt.id] = f"token id {max(ids)}, the target has {target.dims.vocab_size}: another tokenizer's"
            continue
        for sample in range(config.samples_per_prompt):
            name = prompt.id if config.samples_per_prompt == 1 else f"{prompt.id}/sample{sample}"
            key = hashlib.sha256(f"{seed}/{prompt.id}/{sample}".encode()).digest()[:8]
            jobs.append(_Job(name, prompt, ids, int.from_bytes(key, "big") >> 1))
    jobs.sort(key=lambda job: len(job.first_ids))
    return jobs, skipped


def _order(jobs: int, together: int, config: DistillConfig, seed: int) -> list[int]:
    """Index of every batch's first job, in the order of work: at random where time may not suffice for all."""
    starts = list(range(0, jobs, together))
    if config.max_seconds is not None:
        random.Random(seed).shuffle(starts)
    return starts


def _prompt_room(target: Target, config: DistillConfig) -> int:
    """Longest prompt, in tokens, that leaves room for the answer."""
    room = target.positions - config.max_new_tokens
    return room if config.max_prompt_tokens is None else min(room, config.max_prompt_tokens)


def answer_batch(target: Target, chats: Chats, batch: list[_Job], config: DistillConfig, generator: Generator) -> None:
    """Answer all questions of the batch's prompts, turn by turn, into `job.turns` and `job.answers`."""
    room = _prompt_room(target, config)
    for turn in range(max(job.prompt.answers for job in batch)):
        active, prompts = [], []
        for job in batch:
            if job.stopped is not None or turn >= job.prompt.answers:
                continue
            try:
                ids = job.first_ids if turn == 0 else chats.prompt_ids(job.prompt, job.answers)
            except RefusedError as error:
                job.stopped = f"turn {turn + 1}: {error}"
                continue
            if len(ids) > room:
                job.stopped = f"turn {turn + 1} has {len(ids)} prompt tokens, at most {room} fit"
                continue
            active.append(job)
            prompts.append(ids)
        if not active:
            return
        answers = generator(target, prompts, config, [job.seed for job in active])
        for job, ids, answer in zip(active, prompts, answers, strict=True):
            stopped = answer[-1] in chats.stop_token_ids
            job.turns.append(TokenTurn(tuple(ids), tuple(answer), "stop" if stopped else "length"))
            _remember(job, chats, answer[:-1] if stopped else answer)


def _remember(job: _Job, chats: Chats, answer: Sequence[int]) -> None:
    """Add the message that an answer stands for. If there is none, no later question is asked."""
    if not job.prompt.first:  # a prompt of token ids needs no template; the text is for people
        job.answers.append({"role": "assistant", "content": chats.tokenizer.decode(answer, skip_special_tokens=True)})
        return
    try:
        message = chats.of(job.prompt).answer_message(answer)
    except RefusedError as error:
        message = {"role": "assistant", "content": chats.tokenizer.decode(answer, skip_special_tokens=True)}
        if len(job.turns) < job.prompt.answers:
            job.stopped = f"turn {len(job.turns) + 1}: {error}"
    job.answers.append(message)


@torch.inference_mode()
def generate(
    target: Target,
    prompts: Sequence[Sequence[int]],
    config: DistillConfig,
    seeds: Sequence[int],
) -> list[list[int]]:
    """Decode a left-padded batch with a key/value cache; each answer ends with its stop token or at max_new_tokens.

    Args:
        prompts: token ids, one list per row.
        seeds: one per row, 0 … 2^63 - 1, for sampling.
    """
    from transformers import DynamicCache

    device, rows = target.device, len(prompts)
    longest = max(len(ids) for ids in prompts)
    tokens_BT = torch.zeros(rows, longest, dtype=torch.int64)
    mask_BT = torch.zeros(rows, longest, dtype=torch.int64)
    for row, ids in enumerate(prompts):
        tokens_BT[row, longest - len(ids) :] = torch.tensor(ids)
        mask_BT[row, longest - len(ids) :] = 1
    tokens_BT, mask_BT = tokens_BT.to(device), mask_BT.to(device)
    position_BT = (mask_BT.cumsum(1) - 1).clamp(min=0)
    cache = {cache_argument(target.model): DynamicCache(config=target.model.config)}
    stops = set(target.stop_token_ids)
    answers: list[list[int]] = [[] for _ in prompts]
    open_rows = set(range(rows))
    seed_B = torch.tensor(list(seeds), dtype=torch.int64, device=device)
    for step in range(config.max_new_tokens):
        output = target.model(
            input_ids=tokens_BT, attention_mask=mask_BT, position_ids=position_BT, use_cache=True,
            logits_to_keep=1, **cache,
        )  # fmt: skip
        uniform_B = uniforms(seed_B, position_BT[:, -1] + 1)
        chosen = choose(output.logits[:, -1], config, uniform_B).tolist()
        for row in sorted(open_rows):
            answers[row].append(chosen[row])
            if chosen[row] in stops:
                open_rows.discard(row)
        if not open_rows or step + 1 == config.max_new_tokens:
            break
        tokens_BT = torch.tensor(chosen, device=device)[:, None]
        mask_BT = torch.cat([mask_BT, mask_BT.new_ones(rows, 1)], dim=1)
        position_BT = position_BT[:, -1:] + 1
    return answers


def choose(logits_BV: Tensor, config: DistillConfig, uniform_B: Tensor) -> Tensor:
    """The next token of every row, int64 [B]: argmax, or a draw after temperature, top-k and top-p.

    Args: uniform_B: float64 in [0, 1), where the cumulative distribution is read.
    """
    if config.temperature == 0:
        return logits_BV.argmax(-1)
    return draw_at(distribution(logits_BV, config.temperature, config.top_k, config.top_p), uniform_B)


def _sampling(
    target: Target, config: DistillConfig, seed: int, template_kwargs: dict[str, Any] | None
) -> dict[str, Any]:
    """Everything that decides the answers. It is stored in every record and compared when a run continues."""
    fingerprint = target.fingerprint()
    template = json.dumps([fingerprint["template_hash"], template_kwargs or {}], sort_keys=True)
    settings: dict[str, Any] = {
        "target": fingerprint["name"],
        "weights": fingerprint["weight_hash"][:12],
        "dtype": fingerprint["dtype"],
        "template": hashlib.sha256(template.encode()).hexdigest()[:12],
        "max_new_tokens": config.max_new_tokens,
        "temperature": config.temperature,
    }
    if config.temperature > 0:
        settings |= {"top_p": config.top_p, "top_k": config.top_k, "seed": seed, "samples": config.samples_per_prompt}
    return settings


def _record(job: _Job, settings: dict[str, Any]) -> dict[str, Any]:
    messages = [*job.prompt.messages(job.answers[:-1]), job.answers[-1]]
    turns = [
        {
            "prompt_token_ids": list(t.prompt_ids),
            "response_token_ids": list(t.response_ids),
            "finish_reason": t.finish_reason,
        }
        for t in job.turns
    ]
    record: dict[str, Any] = {"id": job.id, "messages": messages, **turns[-1]}
    prompt = job.prompt
    more = {"earlier_turns": turns[:-1], "tools": list(prompt.tools), "chat_template_kwargs": prompt.template_kwargs}
    record |= {name: value for name, value in more.items() if value}
    if prompt.task is not None:
        record["task"] = prompt.task
    return {**record, "sampling": settings}


def _append(out: Path, records: Sequence[dict[str, Any]]) -> None:
    lines = "".join(json.dumps(r, ensure_ascii=False, separators=(",", ":")) + "\n" for r in records).encode()
    with explain_disk(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        with open(out, "ab") as file:
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())


def resume(out: Path, prompts: Sequence[Prompt], settings: dict[str, Any], progress: Progress) -> set[str]:
    """Ids that are answered in `out` already. A last line that a kill left incomplete is removed and reported.

    Raises: DataError when a record was made with other settings or for another prompt of the same id.
    """
    if not out.exists():
        return set()
    _drop_torn_line(out, progress)
    planned = {prompt.id: prompt for prompt in prompts}
    finished = set()
    remedy = "give another output file, or remove this one to start again"
    for number, record in read_jsonl(out):
        conversation = parse_record(record, f"{out}:{number}", str(number))
        made = conversation.meta.get("sampling")
        if not isinstance(made, dict) or not conversation.turns:
            raise DataError(f"{out}:{number}: found no answer of a distillation: {remedy}")
        for key in sorted({*settings, *made} - {"target"}):  # the hash of the weights tells targets apart
            if made.get(key) != settings.get(key):
                raise DataError(
                    f"{out}:{number}: sampling.{key}: found {made.get(key)!r}, this run has "
                    f"{settings.get(key)!r}: {remedy}"
                )
        name = conversation.id
        prompt = planned.get(name.rsplit("/sample", 1)[0], planned.get(name))
        if prompt is not None and not _belongs_to(conversation, prompt):
            raise DataError(f"{out}:{number}: found another prompt under the id {name!r}: {remedy}")
        finished.add(name)
    return finished


def _belongs_to(made: Conversation, prompt: Prompt) -> bool:
    """Whether a finished record answers this prompt, or at least its first questions."""
    first = prompt.prompt_token_ids
    if len(made.turns) > prompt.answers or (first is not None and made.turns[0].prompt_ids != first):
        return False
    if (made.tools, made.template_kwargs) != (prompt.tools, prompt.template_kwargs):
        return False
    place = 0
    for group in (prompt.first, *prompt.later)[: len(made.turns)]:
        if made.messages[place : place + len(group)] != group:
            return False
        place += len(group) + 1
    return len(made.messages) == place


def _drop_torn_line(out: Path, progress: Progress) -> None:
    content = out.read_bytes()
    if not content or content.endswith(b"\n"):
        return
    keep = content.rfind(b"\n") + 1
    with explain_disk(out), open(out, "r+b") as file:
        file.truncate(keep)
        os.fsync(file.fileno())
    progress(0, 0, f"{out}: dropped a last line of {len(content) - keep} bytes that a killed run left incomplete")
