"""Conversations → samples, with a report of what is dropped or cut; and a recipe's whole `data` node in one call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headstart.data.chat.chat import Masked, begins_with_answer
from headstart.data.chat.pieces import LEFT_OUT, WHAT_HELPS
from headstart.data.choosing.gather import Gathered, first_prompts
from headstart.data.choosing.separate import separate
from headstart.data.choosing.split import Split, prompt_key
from headstart.data.config import DataConfig, SourceConfig
from headstart.data.encoding import Encoder, encode_on_ranks
from headstart.data.ranks import ALONE, Ranks
from headstart.data.records.conversation import Conversation, unread_note
from headstart.data.records.media import file_and_line
from headstart.data.samples import Sample, require_supervised
from headstart.data.sources.rejects import Rejects
from headstart.data.spool import Spool
from headstart.heads.counting import counted
from headstart.heads.errors import DataError, first_names

#: beginning of a reason for dropping conversations → what helps
REMEDIES = {
    "its answer was cut": "a larger data.distill.max_new_tokens cuts fewer answers",
    "no assistant answer": (
        "prompts alone belong in data.distill.prompts: the target answers them; a field of another name that holds the "
        "answer is named in columns of the source, such as {prompt: question, response: answer}"
    ),
    LEFT_OUT: WHAT_HELPS.format("train on", "train"),
}
#: end of the reason for dropping a sample of which data.max_length left too little, and what helps
CUT = " within max_length"
LARGER = "a larger data.max_length keeps more of an answer behind a long prompt"
#: reason for dropping a conversation that the template wrote no answer of
NOTHING = "no sample"


@dataclass
class TokenizeReport:
    """What became of the conversations. Whatever is dropped or cut is listed here.

    Attributes:
        conversations, samples: number of conversations read and of samples made.
        tokens, supervised_tokens: of the samples.
        dropped: reason → ids of conversations (or samples) left out.
        truncated: ids of samples cut at max_length.
        open_ended: samples whose last answer has no end-of-turn token (finish_reason "length").
        split: conversations that became several samples because the template rewrites earlier turns.
        broken: ids of samples with an answer that has text after a stop token.
        greetings: conversations that begin with an assistant message before any question; it is context only.
        unread: field that is not read → number of conversations that have it.
        template: lines about how the chat template is used.
        lost: (source, reason) → number of conversations of which nothing is left.
    """

    conversations: int = 0
    samples: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    dropped: dict[str, list[str]] = field(default_factory=dict)
    truncated: list[str] = field(default_factory=list)
    open_ended: int = 0
    split: int = 0
    broken: list[str] = field(default_factory=list)
    greetings: int = 0
    unread: dict[str, int] = field(default_factory=dict)
    template: list[str] = field(default_factory=list)
    lost: Counter[tuple[int, str]] = field(default_factory=Counter)

    @property
    def dropped_count(self) -> int:
        return sum(map(len, self.dropped.values()))

    def drop(self, reason: str, name: str) -> str:
        """Count a conversation or sample that is left out; returns the reason."""
        self.dropped.setdefault(reason, []).append(name)
        return reason

    def lines(self) -> list[str]:
        """The report in words, one fact a line."""
        share = self.supervised_tokens / self.tokens if self.tokens else 0.0
        lines = [
            f"{counted(self.conversations, 'conversations')} → {counted(self.samples, 'samples')}, "
            f"{counted(self.tokens, 'tokens')}, {self.supervised_tokens} supervised ({share:.0%})"
        ]
        for reason, names in sorted(self.dropped.items()):
            lines.append(f"dropped {len(names)}: {reason} ({first_names(names)})")
        lines += [told for begin, told in REMEDIES.items() if any(reason.startswith(begin) for reason in self.dropped)]
        lines += [LARGER] if any(reason.endswith(CUT) for reason in self.dropped) else []
        if self.truncated:
            lines.append(f"truncated {len(self.truncated)} at max_length ({first_names(self.truncated)})")
        if self.open_ended:
            lines.append(f"{self.open_ended} ended without an end-of-turn token (answer cut by length)")
        if self.split:
            lines.append(f"{self.split} became one sample per answer (the chat template rewrites earlier turns)")
        if self.broken:
            lines.append(
                f"{len(self.broken)} with a stop token inside an answer; what stands behind it does not train "
                f"({first_names(self.broken)})"
            )
        if self.greetings:
            lines.append(f"{self.greetings} beginning with an answer that no question precedes: it is context only")
        if note := unread_note(self.unread):
            lines.append(note)
        return lines + self.template

    def as_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "lost"}


def tokenize(
    conversations: Iterable[Conversation],
    tokenizer: Any,
    config: DataConfig,
    stop_token_ids: Sequence[int],
    ranks: Ranks = ALONE,
) -> tuple[list[Sample], TokenizeReport]:
    """Samples of all conversations, in order, the same on every rank. Token ids of a record are used before its text.

    Raises: TemplateError when the tokenizer has no chat template, or one that cannot be masked, and text needs it;
        DataError when the ranks do not read the same conversations.
    """
    samples: list[Sample] = []
    report, spool = TokenizeReport(), Spool()
    encode = Encoder(tokenizer, stop_token_ids, config)
    for conversation, encoded in encode_on_ranks(conversations, encode, ranks):
        report.conversations += 1
        for field_name in conversation.unread:
            report.unread[field_name] = report.unread.get(field_name, 0) + 1
        if isinstance(encoded, str):
            named = conversation.id if conversation.media is None else file_and_line(conversation.where)
            report.drop(encoded, named)
            report.lost[conversation.source, encoded] += 1
            continue
        report.split += len(encoded) > 1
        report.greetings += not conversation.turns and begins_with_answer(conversation.messages)
        made: list[Sample | str] = []
        for number, item in enumerate(encoded):
            name = conversation.id if len(encoded) == 1 else f"{conversation.id}/turn{number}"
            made.append(_sample(name, item, conversation, config, report, spool))
        whole = [sample for sample in made if isinstance(sample, Sample)]
        samples += whole
        if not whole:
            report.lost[conversation.source, str(made[0]) if made else NOTHING] += 1
    report.samples = len(samples)
    report.template = sorted({note for notes in ranks.gather(encode.notes) for note in notes})
    return samples, report


def _sample(
    name: str, item: Masked, conversation: Conversation, config: DataConfig, report: TokenizeReport, spool: Spool
) -> Sample | str:
    """The sample, or the reason for which it is dropped."""
    tokens, turns, finish, broken = item
    whole = len(tokens)
    if whole > config.max_length:
        if config.too_long == "drop":
            return report.drop(f"longer than max_length={config.max_length} tokens", name)
        if len(tokens) and (turns[config.max_length :] >= 0).any():
            finish = "length"
        tokens, turns = tokens[: config.max_length], turns[: config.max_length]
    supervised = int(np.count_nonzero(turns >= 0))
    if supervised < config.min_supervised:
        cut = CUT if whole > config.max_length else ""
        return report.drop(f"fewer than min_supervised={config.min_supervised} supervised tokens{cut}", name)
    if whole > config.max_length:
        report.truncated.append(name)
    report.tokens += len(tokens)
    report.supervised_tokens += supervised
    report.open_ended += finish == "length"
    if broken:
        report.broken.append(name)
    meta: dict[str, Any] = {"conversation": conversation.id, "task": conversation.task, "source": conversation.source}
    meta["prompt_key"] = prompt_key(conversation)
    return spool.sample(name, tokens, turns, finish, meta)


@dataclass
class PreparedData:
    """Samples to train on and to validate on, with the reports of how they were made.

    Attributes:
        held_out_report: None unless the held-out conversations have files of their own.
        rejects: rows of both sides that could not be read and were left out (`on_bad: skip`).
        gathered: what became of the conversations of each source.
        held_out_gathered: the same of `data.held_out`, or None.
    """

    split: Split
    report: TokenizeReport
    held_out_report: TokenizeReport | None = None
    rejects: Rejects = field(default_factory=Rejects)
    gathered: Gathered | None = None
    held_out_gathered: Gathered | None = None

    @property
    def train(self) -> list[Sample]:
        return self.split.train

    @property
    def held_out(self) -> list[Sample]:
        return self.split.held_out


def prepare(
    config: DataConfig,
    tokenizer: Any,
    stop_token_ids: Sequence[int],
    distilled: Sequence[SourceConfig] = (),
    seed: int = 0,
    ranks: Ranks = ALONE,
    watched: Sequence[np.ndarray] = (),
) -> PreparedData:
    """Everything between the recipe's `data` node and the packs.

    Args:
        distilled: files that distillation wrote for this run; read after `config.sources`.
        ranks: processes that call this together and divide the tokenising.
        watched: prompts of an evaluation, as `shingles.of_messages` gives them. Conversations that begin with one are
            counted.
    Raises: DataError when nothing would train; TemplateError and ConfigError as `tokenize` and the sources do.
    """
    rejects = Rejects()

    def read(
        sources: Sequence[SourceConfig], *prompts: Sequence[np.ndarray]
    ) -> tuple[Gathered, list[Sample], TokenizeReport]:
        gathered = Gathered(sources, config, seed, *prompts)
        samples, report = tokenize(gathered.conversations(rejects), tokenizer, config, stop_token_ids, ranks)
        gathered.add_lost(report.lost)
        return gathered, gathered.without_near(samples), report

    gathered, samples, report = read([*config.sources, *distilled], first_prompts(config.exclude, rejects), watched)
    if not samples:
        why = "\n".join([*report.lines(), *rejects.lines(), *gathered.lines()])
        raise DataError(f"data: no conversation can be trained on\n{why}")
    require_supervised(samples)
    if not config.held_out:
        split = separate(samples, None, gathered, None, config, seed)
        return PreparedData(split, report, None, rejects, gathered)
    held_gathered, held, held_report = read(config.held_out)
    split = separate(samples, held, gathered, held_gathered, config, seed)
    return PreparedData(split, report, held_report, rejects, gathered, held_gathered)
