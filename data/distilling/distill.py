"""The target answers prompts, into a JSONL file that a killed run continues.

Which answers there are is fixed before work starts, and every answer has random numbers of its own. Each is written as
soon as it is finished, in whatever order that happens; a run that continues asks only what is missing. So what a kill
costs are the answers in flight. At the end the file is put into one order.

What is decoded beside an answer can change it by rounding alone: where two tokens are nearly tied, a run that continues
may choose the other one. In float32 on one machine greedy answers came out the same in every test.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headstart.data.chat.pieces import LEFT_OUT, WHAT_HELPS
from headstart.data.chat.rendering import RefusedError
from headstart.data.config import DistillConfig
from headstart.data.distilling.answer_file import NOT_ASKED, AnswerFile, skipped_of
from headstart.data.distilling.answering import Answer, Answerer, OwnForward, Request, Requests
from headstart.data.features import Progress, silent
from headstart.data.prompts import Chats, Prompt
from headstart.data.ranks import ALONE, Ranks
from headstart.data.records.conversation import TokenTurn, unread_note
from headstart.data.records.media import dropped_for, dropped_lines
from headstart.data.records.messages import Message
from headstart.heads.counting import counted
from headstart.heads.errors import DataError
from headstart.heads.files import read_json, write_json
from headstart.heads.targets.target import Target


@dataclass
class _Job:
    """One prompt and the answers to its questions; a prompt with several samples has a job for each.

    Attributes:
        first_ids: token ids of the first question.
        more: further fields of every turn.
        stopped: why the later questions were not asked, or None.
    """

    id: str
    prompt: Prompt
    first_ids: list[int]
    seed: int
    answers: list[Message] = field(default_factory=list)
    turns: list[TokenTurn] = field(default_factory=list)
    more: list[Mapping[str, Any]] = field(default_factory=list)
    stopped: str | None = None


def distill(
    target: Target,
    prompts: Sequence[Prompt],
    config: DistillConfig,
    out: Path,
    seed: int = 0,
    progress: Progress = silent,
    template_kwargs: dict[str, Any] | None = None,
    answerer: Answerer | None = None,
    ranks: Ranks = ALONE,
) -> Path:
    """Answer every prompt (its questions one after another, see `prompt_of`) and add the records to `out`.

    A record holds `id`, `messages`, `sampling`, and of the last turn `prompt_token_ids`, `response_token_ids` and
    `finish_reason`. Turns before it are in `earlier_turns`. The prompt's `tools`, `chat_template_kwargs` and `task` are
    copied. `response_token_ids` ends with the stop token exactly when `finish_reason` is "stop".

    For a later question, an answer is put into the history as the message that `parse_answer` makes of it. Prompts that
    cannot be answered and later questions that cannot be asked are reported through `progress` and listed with their
    reason in `OUT.skipped.json`; the others go on.

    Args:
        answerer: answers requests; None takes the model's own forward.
        ranks: the processes of a launch, among which the prompts are divided. All must call this function with the same
            arguments, each with a target and an answerer of its own. `progress` counts a process's own share.
        config: after `config.max_seconds` no further prompt begins; the first batch always does.
    Raises: DataError when `out` was made with other settings or prompts, or nothing can be answered;
        StorageError on a full disk.
    """
    config.check()
    answerer = answerer or OwnForward(target, config)
    chats = Chats(target.tokenizer, target.stop_token_ids, template_kwargs)
    settings = _sampling(target, config, seed, template_kwargs, answerer.decides)
    file = AnswerFile(Path(out), ranks)
    jobs, skipped = _make_jobs(chats, target, prompts, config, seed)
    if ranks.rank == 0:
        answerer.adopt(Path(out), [(_request(job, job.first_ids, chats), job.prompt) for job in jobs], progress)
    finished = file.resume(prompts, settings, progress)
    _report(prompts, jobs, skipped, chats, progress)
    missing = [job for job in _in_order(jobs, config, seed) if job.id not in finished]
    mine = missing[ranks.rank :: ranks.size]
    asking = _Asking(target, chats, config, mine)
    done = len(jobs) - len(missing)
    total = done + len(mine)
    progress(done, total, f"{counted(done, 'answers')} found in {out}" if done else "")
    try:
        for answer in answerer.answers(asking.requests):
            job = asking.take(answer)
            if job is None:
                continue
            if job.turns:
                file.add(_record(job, settings))
                done += 1
            said = ""
            if job.stopped is not None:
                skipped[job.id] = job.stopped
                said = f"{job.id}: " + ("later turns left out: " if job.turns else "no answer: ") + job.stopped
            progress(done, total, said)
    finally:
        file.close()
    if asking.requests.over:
        over = f"data.distill.max_seconds={config.max_seconds:g} are over: {done} of {counted(total, 'answers')}"
        progress(done, total, over)
    done = len(jobs) - len(missing) + file.finish([job.id for job in jobs])
    for found in ranks.gather(skipped):
        skipped |= found
    if ranks.rank == 0:
        _list_skipped(file.out, skipped, finished)
    progress(done, len(jobs), "")
    return file.out


class _Asking:
    """The conversations that one process asks for.

    Attributes: requests: what the answerer takes from.
    """

    def __init__(self, target: Target, chats: Chats, config: DistillConfig, jobs: Sequence[_Job]):
        self.chats = chats
        self.room = _prompt_room(target, config)
        self._open: dict[Request, _Job] = {}
        self._limit_s = config.max_seconds
        self._began: float | None = None
        self.requests = Requests([self._request(job, job.first_ids) for job in jobs], self._may_begin)

    def _may_begin(self) -> bool:
        if self._began is None:
            self._began = time.monotonic()
            return True
        return self._limit_s is None or time.monotonic() - self._began < self._limit_s

    def _request(self, job: _Job, ids: Sequence[int]) -> Request:
        request = _request(job, ids, self.chats)
        self._open[request] = job
        return request

    def take(self, answer: Answer) -> _Job | None:
        """Add an answer to its conversation. Returns the conversation if it ends with it; else its next question joins
        the requests."""
        job = self._open.pop(answer.request)
        if answer.failed is not None:
            job.stopped = f"turn {answer.request.turn + 1}: {answer.failed}" if job.turns else answer.failed
            if not answer.for_good:
                job.turns = []
            return job
        tokens, stopped = answer.token_ids, answer.finish_reason == "stop"
        job.turns.append(TokenTurn(answer.request.prompt_ids, tuple(tokens), answer.finish_reason))
        job.more.append(answer.more)
        if answer.message is not None:
            job.answers.append(answer.message)
        else:
            _remember(job, self.chats, tokens[:-1] if stopped else tokens)
        ids = self._following(job)
        if ids is None:
            return job
        self.requests.put(self._request(job, ids))
        return None

    def _following(self, job: _Job) -> list[int] | None:
        """Token ids of the chat that the next answer follows; None if no further one is asked for."""
        if job.stopped is not None or len(job.turns) >= job.prompt.answers:
            return None
        turn = len(job.turns) + 1
        try:
            ids = self.chats.prompt_ids(job.prompt, job.answers)
        except RefusedError as error:
            job.stopped = f"turn {turn}: {error}"
            return None
        if len(ids) > self.room:
            job.stopped = f"turn {turn} has {len(ids)} prompt tokens, at most {self.room} fit"
            return None
        return ids


def _request(job: _Job, ids: Sequence[int], chats: Chats) -> Request:
    """The next question of a conversation. Args: ids: the tokens of its chat."""
    prompt = job.prompt
    kwargs = {**chats.template_kwargs, **prompt.template_kwargs}
    messages = prompt.messages(job.answers) if prompt.first else ()
    return Request(job.id, len(job.turns), tuple(ids), job.seed, messages, prompt.tools, kwargs)


def _report(
    prompts: Sequence[Prompt], jobs: Sequence[_Job], skipped: Mapping[str, str], chats: Chats, progress: Progress
) -> None:
    """Say what is left out. Raises: DataError when nothing can be answered."""
    unread = unread_note(Counter(name for prompt in prompts for name in prompt.unread))
    for note in [*chats.notes, *([unread] if unread else [])]:
        progress(0, len(jobs), note)
    held = {prompt.id: (prompt.media, prompt.where) for prompt in prompts if prompt.media is not None}
    for note in dropped_lines(held.values()):
        progress(0, len(jobs), note)
    for name, cause in skipped.items():
        if name not in held:
            progress(0, len(jobs), f"skipped {name}: {cause}")
    left_out = any(cause.startswith(LEFT_OUT) for cause in skipped.values())
    helps = WHAT_HELPS.format("ask with", "ask") if left_out else ""
    if helps:
        progress(0, len(jobs), helps)
    if prompts and not jobs:
        name, cause = next(iter(skipped.items()))
        first = f"none of {counted(len(prompts), 'prompts')} can be answered; the first, {name}: {cause}"
        raise DataError(f"distill: {first}{'; ' * bool(helps)}{helps}")


def _list_skipped(out: Path, skipped: dict[str, str], finished: Mapping[str, str | None]) -> None:
    """Write what was left out, with what earlier runs left out of finished conversations."""
    place = skipped_of(out)
    earlier = read_json(place) if place.is_file() else {}
    skipped |= {name: cause for name, cause in earlier.items() if name in finished}
    skipped |= {name: cause for name, cause in finished.items() if cause is not None}
    if skipped:
        write_json(place, skipped)
    else:
        place.unlink(missing_ok=True)


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


def _in_order(jobs: Sequence[_Job], config: DistillConfig, seed: int) -> list[_Job]:
    """The jobs in the order of work: by length, so that those decoded together are alike. Where time may not suffice
    for all, groups of them come at random."""
    groups = [jobs[start : start + config.batch_size] for start in range(0, len(jobs), config.batch_size)]
    if config.max_seconds is not None:
        random.Random(seed).shuffle(groups)
    return [job for group in groups for job in group]


def _prompt_room(target: Target, config: DistillConfig) -> int:
    """Longest prompt, in tokens, that leaves room for the answer."""
    room = target.positions - config.max_new_tokens
    return room if config.max_prompt_tokens is None else min(room, config.max_prompt_tokens)


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


def _sampling(
    target: Target,
    config: DistillConfig,
    seed: int,
    template_kwargs: dict[str, Any] | None,
    decides: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything that decides the answers. It is stored in every record and compared when a run continues.

    Args: decides: of the answerer; None there leaves a value out. Where the weights are, they need not be loaded.
    """
    fingerprint = target.fingerprint("weights" not in decides)
    template = json.dumps([fingerprint["template_hash"], template_kwargs or {}], sort_keys=True)
    settings: dict[str, Any] = {
        "target": fingerprint["name"],
        "weights": (fingerprint["weight_hash"] or "")[:12],
        "dtype": fingerprint["dtype"],
        "template": hashlib.sha256(template.encode()).hexdigest()[:12],
        "max_new_tokens": config.max_new_tokens,
        "temperature": config.temperature,
    }
    if config.temperature > 0:
        settings |= {"top_p": config.top_p, "top_k": config.top_k, "seed": seed, "samples": config.samples_per_prompt}
    return {name: value for name, value in {**settings, **decides}.items() if value is not None}


def _record(job: _Job, settings: dict[str, Any]) -> dict[str, Any]:
    messages = [*job.prompt.messages(job.answers[:-1]), job.answers[-1]]
    turns = [
        {
            "prompt_token_ids": list(t.prompt_ids),
            "response_token_ids": list(t.response_ids),
            "finish_reason": t.finish_reason,
            **more,
        }
        for t, more in zip(job.turns, job.more, strict=True)
    ]
    record: dict[str, Any] = {"id": job.id, "messages": messages, **turns[-1]}
    prompt = job.prompt
    others = {"earlier_turns": turns[:-1], "tools": list(prompt.tools), "chat_template_kwargs": prompt.template_kwargs}
    record |= {name: value for name, value in others.items() if value}
    if prompt.task is not None:
        record["task"] = prompt.task
    if job.stopped is not None:
        record[NOT_ASKED] = job.stopped
    return {**record, "sampling": settings}
