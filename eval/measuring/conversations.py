"""The conversations of a benchmark: its prompts are asked in batches of one task and one turn.

Headstart's own loop and running servers are asked in the same order, and leave later turns out by the same rules.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from headstart.data.features import Progress
from headstart.data.prompts import Prompt
from headstart.data.records.conversation import unread_note
from headstart.data.records.messages import Message
from headstart.heads.counting import counted

#: seconds between two reports of how far a batch is
WATCH_S = 0.5


@dataclass(frozen=True)
class Asked:
    """One batch: the question of one turn to prompts of one task. `number` counts the batches from 0."""

    number: int
    task: str
    turn: int
    prompts: list[Prompt]


def batches(prompts: list[Prompt], size: int) -> Iterator[Asked]:
    """Batches of one task each, so that tasks are timed by themselves; the turns of a batch come in order."""
    number = 0
    for task in dict.fromkeys(str(prompt.task) for prompt in prompts):
        members = [prompt for prompt in prompts if prompt.task == task]
        for start in range(0, len(members), size):
            group = members[start : start + size]
            for turn in range(max(prompt.answers for prompt in group)):
                yield Asked(number, task, turn, [prompt for prompt in group if turn < prompt.answers])
                number += 1


class Conversations:
    """What has been said so far, and which conversations have ended before their last question.

    Args:
        progress: told before each step what is done next, and how far a batch is (`watch`). A step is an answer, or one
            point of a sweep.
        more: steps beside the answers.
    Attributes:
        said: id(prompt) → the target's answers so far.
        cut: number of answers that were cut off before eval.max_new_tokens.
    """

    def __init__(self, prompts: list[Prompt], progress: Progress | None = None, more: int = 0):
        self.prompts = prompts
        self.said: dict[int, list[Message]] = {id(prompt): [] for prompt in prompts}
        self.cut = 0
        self._progress = progress
        self._done, self._total = 0, sum(prompt.answers for prompt in prompts) + more
        self._before, self._what, self._how, self._ends, self._watched = 0, "", "", False, 0.0
        self._ended: dict[int, str] = {}
        self._left_out: Counter[str] = Counter()

    def batches(self, size: int) -> Iterator[Asked]:
        """Batches without the conversations that have ended, whose questions are counted as left out."""
        for asked in batches(self.prompts, size):
            self.tell(asked.task, len(asked.prompts))
            for prompt in asked.prompts:
                if (reason := self._ended.get(id(prompt))) is not None:
                    self._left_out[reason] += 1
            open_prompts = [prompt for prompt in asked.prompts if id(prompt) not in self._ended]
            if open_prompts:
                yield Asked(asked.number, asked.task, asked.turn, open_prompts)

    def end(self, prompt: Prompt, reason: str) -> None:
        """Ask this prompt no further question."""
        self._ended[id(prompt)] = reason

    def leave_out(self, prompt: Prompt, reason: str) -> None:
        """As `end`, and count the current question as left out."""
        self.end(prompt, reason)
        self._left_out[reason] += 1

    def tell(self, what: str, steps: int = 1) -> None:
        """Report progress before the next `steps`."""
        self._before, self._what, self._how, self._ends = self._done, what, "", False
        self._watched = time.monotonic()
        if self._progress is not None:
            self._progress(self._done, self._total, what)
        self._done += steps

    def decoding(self, how: str, ends: bool = False) -> None:
        """How the batch is decoded now, prompts first. Args: ends: whether a step is done when its answer has ended."""
        self._how, self._ends, self._watched = how, ends, time.monotonic()
        if self._progress is not None:
            self._progress(self._before, self._total, f"{self._what}  {how} reading prompts")

    def watch(self, tokens: int, ended: int, answers: int) -> None:
        """Report how far the batch is that is being decoded: a decode loop's `Watch`. A batch may take minutes."""
        now = time.monotonic()
        if self._progress is None or now - self._watched < WATCH_S:
            return
        self._watched = now
        decoded = " ".join(filter(None, (self._how, counted(tokens, "tokens", ","))))
        said = f"{self._what}  {decoded}  {ended} of {counted(answers, 'answers')} ended"
        self._progress(self._before + (ended if self._ends else 0), self._total, said)

    def finish(self) -> None:
        if self._progress is not None:
            self._progress(self._total, self._total, "done")

    def notes(self, limit: int, why_cut: str, more: list[str]) -> list[str]:
        """Notes for the report. Args: limit: eval.max_new_tokens; more: notes that stand before the last one."""
        cut = counted(self.cut, "answers")
        notes = [f"{cut} ended before eval.max_new_tokens={limit}: {why_cut}"] if self.cut else []
        notes += [f"{counted(count, 'later turns')} left out: {reason}" for reason, count in self._left_out.items()]
        unread = unread_note(Counter(name for prompt in self.prompts for name in prompt.unread))
        return [*notes, *more, *([unread] if unread else [])]
