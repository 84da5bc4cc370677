"""The target writes prompts itself: it continues its chat template's opening of a user's message.

An instruct-tuned model has seen many questions between these tokens, and writes another one (Magpie, arXiv 2406.08464,
section 2.1). Every try has a number and random numbers of its own, so the same seed gives the same prompts. Tries are
written and continued as answers are (`distill`), in a file of their own. What can be asked of them is written at the
end.
"""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from headstart.data.config import DistillConfig
from headstart.data.distilling.answering import Answerer, OwnForward
from headstart.data.distilling.distill import distill
from headstart.data.features import Progress, silent
from headstart.data.prompts import Chats, Prompt
from headstart.data.ranks import ALONE, Ranks, on_first
from headstart.data.sources.sources import read_jsonl
from headstart.heads.counting import counted
from headstart.heads.errors import ConfigError, DataError, TemplateError
from headstart.heads.files import write_text
from headstart.heads.targets.target import Target

#: most tries for each prompt that is wanted
TRIES = 2
#: content of a user's message, which is looked for in the template's text
MARKER = "Zebra"
#: an id of a written prompt begins with this; the number of its try follows
ID = "written-"
#: why a try gives no prompt
CUT, EMPTY, SPECIAL, REPEATED = "cut at written_max_tokens", "empty", "with special tokens inside", "said before"
REMEDY = "set data.distill.written=0 and give prompts: data.distill.prompts=[{path: prompts.jsonl}]"


@dataclass(frozen=True)
class Opening:
    """What the chat template writes around the content of a user's message.

    Attributes:
        ids: the tokens before it.
        stops: ids that end it: the target's stop tokens, and the token that the template writes behind it.
        special: ids that no content holds.
    """

    ids: tuple[int, ...]
    stops: tuple[int, ...]
    special: frozenset[int]


@dataclass(frozen=True)
class Written:
    """The prompts that the target wrote.

    Attributes:
        path: a file with a record for each: `id` and `messages`.
        left_out: tries that gave no prompt, by reason.
    """

    path: Path
    wanted: int
    kept: int
    tries: int
    left_out: dict[str, int]

    def line(self) -> str:
        """How many there are, in words."""
        line = f"the target wrote {counted(self.kept, 'prompts')} in {counted(self.tries, 'tries')}"
        line += f" (left out: {self.reasons()})" if self.left_out else ""
        if self.kept < self.wanted:
            line = f"WARNING: {line}; data.distill.written={self.wanted} asks for more, but has {TRIES} tries for each"
        return f"{line}: {self.path}"

    def reasons(self) -> str:
        return ", ".join(f"{number} {reason}" for reason, number in self.left_out.items())

    def as_dict(self) -> dict[str, Any]:
        return {"wanted": self.wanted, "kept": self.kept, "tries": self.tries, "left_out": self.left_out}


def tries_of(out: Path) -> Path:
    """Where every try stands, as an answer to the opening of a user's message."""
    return out.with_name(f"{out.stem}.tries.jsonl")


def opening_of(target: Target, config: DistillConfig, template_kwargs: dict[str, Any] | None = None) -> Opening:
    """What the target continues. Its weights are not needed.

    Raises: TemplateError where there is no template, or it does not show where a user's message begins and ends;
        ConfigError where prompts of `data.distill.written_max_tokens` do not fit.
    """
    chat = Chats(target.tokenizer, target.stop_token_ids, template_kwargs).of(Prompt.ask("", MARKER))
    text = chat.render([{"role": "user", "content": MARKER}], add_generation_prompt=True)
    if text.count(MARKER) != 1:
        raise TemplateError(
            f"data.distill.written: found the content of a user's message {text.count(MARKER)} times in the chat "
            f"template's text, expected once, where the target writes its own: {REMEDY}"
        )
    begin = text.index(MARKER)
    tokens = next(chat.cutter.tokens([text]))
    # a space and the word behind it are most often one token, which is the target's to write
    words = len(text[:begin].rstrip(" "))
    before = next(number for number, (_, end) in enumerate(tokens.offsets) if end > words)
    ids = tuple(tokens.ids[:before])
    special = _special(target.tokenizer)
    end, behind = begin + len(MARKER), text[begin + len(MARKER) :]
    follows = end + len(behind) - len(behind.lstrip())  # some special tokens take the white space before them
    spans = zip(tokens.ids, tokens.offsets, strict=True)
    closing = [i for i, (start, stop) in spans if i in special and end <= start <= follows < stop]
    if not ids or not closing:
        raise TemplateError(
            f"data.distill.written: found {text[max(begin - 20, 0) : begin]!r} before the content of a user's message "
            f"in the chat template's text and {behind[:20]!r} behind it, expected tokens before it and a special one "
            f"behind it, such as <|im_end|>, at which the target ends its own: {REMEDY}"
        )
    if (room := target.positions - len(ids)) < config.written_max_tokens:
        remedy = f"set data.distill.written_max_tokens={room} or less" if room > 1 else REMEDY
        raise ConfigError(
            f"data.distill.written_max_tokens: found {config.written_max_tokens}, the target has {target.positions} "
            f"positions, of which {len(ids)} go before the prompt: {remedy}"
        )
    return Opening(ids, tuple(dict.fromkeys([*target.stop_token_ids, *closing])), special)


def _special(tokenizer: Any) -> frozenset[int]:
    """Ids of the tokens that are no text: those added to the vocabulary, white space apart."""
    added = {i for text, i in tokenizer.get_added_vocab().items() if text.strip()}
    return frozenset(added.union(tokenizer.all_special_ids))


def write_prompts(
    target: Target,
    config: DistillConfig,
    out: Path,
    seed: int = 0,
    progress: Progress = silent,
    template_kwargs: dict[str, Any] | None = None,
    answerer_of: Callable[[Target, DistillConfig], Answerer] = OwnForward,
    ranks: Ranks = ALONE,
) -> Written:
    """Have the target write `config.written` prompts into `out`, which is made anew from the tries that are there.

    It tries again until there are enough, at most TRIES times as often as prompts are wanted. A try gives no prompt
    where it is cut at `config.written_max_tokens`, empty, has special tokens inside or says what an earlier one says.
    White space around a prompt is left out. `config.max_seconds` does not count here.

    Args:
        answerer_of: makes what continues the opening, for a target with the stop tokens of a user's message and the
            settings of the tries.
        ranks: as in `distill`: the processes share the tries, and all must call this function.
    Raises: as `opening_of`; DataError when the tries were made with other settings, or none of them gives a prompt;
        StorageError on a full disk.
    """
    opening = opening_of(target, config, template_kwargs)
    writer = copy.copy(target)
    writer.stop_token_ids = opening.stops
    settings = DistillConfig(
        max_new_tokens=config.written_max_tokens,
        temperature=config.written_temperature,
        top_p=config.written_top_p,
        batch_size=config.batch_size,
    )
    answerer = answerer_of(writer, settings)
    tries, most = config.written, TRIES * config.written
    first = True

    def tell(done: int, total: int, message: str) -> None:
        progress(done, total, message if first else "")  # a later round finds the tries of the one before

    while True:
        asked = [Prompt(f"try-{number}", (), prompt_token_ids=opening.ids) for number in range(tries)]
        place = distill(writer, asked, settings, tries_of(out), seed, tell, template_kwargs, answerer, ranks)
        first = False
        made = on_first(ranks, partial(_sort_out, place, out, config.written, tries, opening, target.tokenizer))
        if made.kept >= config.written or tries == most:
            break
        missing, share = config.written - made.kept, made.kept / tries
        tries = min(most, tries + math.ceil(missing / share)) if share else most
    if not made.kept:
        raise DataError(
            f"data.distill.written: found no prompt in {counted(tries, 'tries')} of the target "
            f"({made.reasons()}), expected {config.written}: an instruct-tuned target writes some; with another one, "
            f"{REMEDY}"
        )
    return made


def _sort_out(place: Path, out: Path, wanted: int, tries: int, opening: Opening, tokenizer: Any) -> Written:
    """Write the prompts among the first `tries`, at most `wanted`, in the order of their numbers."""
    left_out: Counter[str] = Counter()
    kept: dict[str, int] = {}
    for number, text in _contents(place, tries, opening, tokenizer, left_out):
        if text in kept:
            left_out[REPEATED] += 1
        else:
            kept[text] = number
    chosen = list(kept.items())[:wanted]
    records = ({"id": f"{ID}{n}", "messages": [{"role": "user", "content": text}]} for text, n in chosen)
    write_text(out, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    return Written(out, wanted, len(chosen), tries, dict(sorted(left_out.items())))


def _contents(
    place: Path, tries: int, opening: Opening, tokenizer: Any, left_out: Counter[str]
) -> Iterator[tuple[int, str]]:
    """(number, text) of the tries that ended with a text, in order. Counts the others."""
    rows = ((int(record["id"].removeprefix("try-")), record) for _, record in read_jsonl(place))
    for number, record in sorted((row for row in rows if row[0] < tries), key=lambda row: row[0]):
        if record["finish_reason"] != "stop":
            left_out[CUT] += 1
            continue
        ids = record["response_token_ids"][:-1]
        text = tokenizer.decode(ids).strip()
        if not text:
            left_out[EMPTY] += 1
        # letters that look like a special token would be read as one
        elif opening.special.intersection([*ids, *tokenizer(text, add_special_tokens=False)["input_ids"]]):
            left_out[SPECIAL] += 1
        else:
            yield number, text
