"""What `headstart inspect` prints for a person: samples with marks and a legend, and a page of numbers."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from headstart.data.inspection import COPY, DRAFTED, OUTSIDE, PROMPT, ROOT, ShownToken, characters
from headstart.heads.counting import counted
from headstart.inspection import Shown

#: scripts below this share of the letters are shown together
RARE_SCRIPT = 0.005
SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


@dataclass(frozen=True)
class Signs:
    """Brackets, which tell marks apart where there are no colours. `small`: numbers are written as subscripts."""

    drafted: str = "⟦⟧"
    supervised: str = "⟨⟩"
    outside: str = "⟪⟫"
    copy: str = "⦅⦆"
    small: bool = True

    def around(self, mark: str, text: str) -> str:
        brackets = "" if mark == PROMPT else getattr(self, mark)
        half = len(brackets) // 2
        return f"{brackets[:half]}{text}{brackets[half:]}"

    def number(self, depths: int) -> str:
        return str(depths).translate(SUBSCRIPTS) if self.small else f"^{depths}"


#: for terminals that cannot show the others
ASCII = Signs("[[]]", "<<>>", "{{}}", "(())", False)


def signs_for(encoding: str | None) -> Signs:
    """Brackets that a stream of this encoding can show."""
    wanted = Signs()
    try:
        "".join((wanted.drafted, wanted.supervised, wanted.outside, wanted.copy, "₀")).encode(encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return wanted


def style_of(token: ShownToken, depth: int) -> str:
    """Colour of a token, for a head of K = `depth`."""
    if token.mark == DRAFTED and token.turn < 0:
        return "cyan"  # of a prompt, which trains too
    if token.mark == DRAFTED:
        return "bold green" if token.depths == depth else "green"
    return {PROMPT: "dim", COPY: "red", ROOT: "bold yellow", OUTSIDE: "bold magenta"}[token.mark]


def sample_text(shown: Shown, depth: int, signs: Signs) -> Text:
    """The text of a sample. Brackets and colours tell what each part is to a head of K = `depth`; a small number stands
    behind a token that is drafted at fewer depths."""
    text = Text().append(f"{shown.title()}\n", style="bold")
    for style, group in groupby(_parts(shown.tokens, depth, signs), key=lambda part: part[0]):
        text.append("".join(written for _, written in group), style=style)
    if shown.cut:
        text.append(" … cut here", style="red")
    return text if text.plain.endswith("\n") else text.append("\n")


def _parts(tokens: Sequence[ShownToken], depth: int, signs: Signs) -> Iterator[tuple[str, str]]:
    """(style, text) of a sample's characters, brackets and small numbers, in order."""
    for mark, group in groupby(characters(tokens), key=lambda token: token.mark):
        before, behind = signs.around(mark, "\0").split("\0")
        same = list(group)
        yield style_of(same[0], depth), before
        for token in same:
            yield style_of(token, depth), token.text
            if mark == DRAFTED and token.depths < depth:
                yield "dim", signs.number(token.depths)
        yield style_of(same[-1], depth), behind


def token_lines(shown: Shown, depth: int) -> Text:
    """One token a line: its turn (. = none), at how many depths it is drafted, its id, its text."""
    text = Text(f"{shown.title()}\nturn drafted     id text\n")
    for token in shown.tokens:
        turn = token.turn if token.turn >= 0 else "."
        drafted = "." if token.mark in (PROMPT, COPY) else token.as_json()["drafted"]
        note = {OUTSIDE: "  (outside the draft vocabulary)", COPY: "  (repeats held-out text)"}.get(token.mark, "")
        line = f"{turn:>4} {drafted:>7} {token.id:>6} {token.text!r}{note}\n"
        text.append(line, style=style_of(token, depth))
    return text


def legend(shown: Sequence[Shown], depth: int, signs: Signs) -> Table:
    """What the marks in these samples mean."""
    marks = {token.mark for each in shown for token in each.tokens}
    some = any(t.mark == DRAFTED and t.depths < depth for each in shown for t in each.tokens)
    fewer = f", at all {depth} depths or at as many as the small number says" if some else ""
    prompts = any(t.mark == DRAFTED and t.turn < 0 for each in shown for t in each.tokens)
    rows = [
        (DRAFTED, "bold green", f"drafted: the head learns to guess it{fewer}"),
        (ROOT, "bold yellow", "supervised, never drafted: what an answer begins with comes from the target"),
        (OUTSIDE, "bold magenta", "supervised, outside the draft vocabulary: the head cannot guess it"),
        (COPY, "red", "repeats held-out text: does not train"),
        (PROMPT, "dim", "prompt and template: context, does not train"),
    ]
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column()
    for mark, style, meaning in rows:
        if mark in marks:
            table.add_row(Text(signs.around(mark, "text"), style=style), Text(meaning))
    if prompts:
        said = "of a prompt, which trains too (data.supervise=all)"
        table.add_row(Text(signs.around(DRAFTED, "text"), style="cyan"), Text(said))
    return table


def page(value: dict[str, Any]) -> RenderableType:
    """The numbers of `inspect --stats` on one page. Args: value: what `inspect --json --stats` prints."""
    stats, train, split = value["statistics"], value["report"]["train"], value["report"]["split"]
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    rows = [("conversations", _conversations(train, split, value)), ("duplicates", _duplicates(stats["duplicates"]))]
    rows += [*_lengths(stats), *_shares(stats, value["supervise"] == "all")]
    if (kept := stats["draft_vocabulary"]) is not None:
        held = f"hold {_percent(kept['coverage'])} of the labels"
        asked = f" and {_percent(kept['choices'])} of the target's choices" if kept["choices"] is not None else ""
        said = f"{kept['size']:,} of {kept['of']:,} tokens {held}{asked} ({kept['origin']})"
        rows.append(("draft vocabulary", said))
    rows.append(("languages", _scripts(stats["scripts"])))
    if (own := stats["own_choice"]) is not None:
        rows.append(("own choice", own["summary"]))
    if "training" in stats:
        rows.append(("training", stats["training"]["summary"]))
    for name, said in rows:
        colour = "red" if said.startswith(("WARNING", "refused")) else ""
        table.add_row(name, Text(said, style=colour))
    return table


def _conversations(train: dict[str, Any], split: dict[str, Any], value: dict[str, Any]) -> str:
    samples, held = value["counts"]["samples"], value["held_out_samples"]
    said = f"{train['conversations']:,} read; {counted(samples, 'samples', ',')} to train on, {held:,} held out"
    dropped = {reason: len(names) for reason, names in train["dropped"].items()}
    if dropped:
        reasons = ", ".join(f"{reason} ({n:,})" for reason, n in sorted(dropped.items(), key=lambda item: -item[1]))
        said += f"; {sum(dropped.values()):,} dropped: {reasons}"
    if train["truncated"]:
        said += f"; {len(train['truncated']):,} cut at data.max_length"
    if open_ended := value["counts"]["open_ended"]:
        said += f"; {open_ended:,} without an end of turn"
    if split["copied_answers"]:
        said += f"; {counted(split['copied_answers'], 'answers', ',')} left out for repeating held-out text"
    return said


def _lengths(stats: dict[str, Any]) -> list[tuple[str, str]]:
    spread = lambda found: ", ".join(f"{name} {n:,}" for name, n in found.items())  # noqa: E731
    lengths = [("tokens a sample", spread(stats["length"])), ("tokens an answer", spread(stats["answer"]))]
    if len(stats["tasks"]) > 1:
        lengths.append(("tasks", ", ".join(f"{task} {n:,}" for task, n in stats["tasks"].items())))
    return lengths


def _shares(stats: dict[str, Any], prompts: bool) -> list[tuple[str, str]]:
    """Args: prompts: they are supervised too."""
    tokens, supervised, drafted = stats["tokens"], stats["supervised_tokens"], stats["drafted_tokens"]
    of = _percent(supervised / tokens if tokens else 0.0)
    too = ", prompts too (data.supervise=all)" if prompts else ""
    part = _percent(drafted / supervised if supervised else 0.0)
    return [
        ("supervised", f"{of} of {counted(tokens, 'tokens', ',')}{too}; {counted(stats['turns'], 'answers', ',')}"),
        ("drafted", f"{part} of these, at up to {counted(stats['depth'], 'depths')}"),
    ]


def _scripts(found: dict[str, Any]) -> str:
    common = {name: share for name, share in found["shares"].items() if share >= RARE_SCRIPT}
    if not common:
        return "no letters in the answers"
    said = ", ".join(f"{name} {_percent(share)}" for name, share in common.items())
    rest = 1 - sum(common.values())
    others = f", others {_percent(rest)}" if len(common) < len(found["shares"]) and rest > 0 else ""
    return f"{said}{others} of the letters in the answers of {counted(found['samples'], 'samples', ',')}, by script"


def _duplicates(found: dict[str, Any]) -> str:
    kinds = (
        ("exact", "exact duplicates left out"),
        ("near", "near duplicates left out"),
        ("held_out", "near copies of held-out conversations left out"),
        ("left", "samples that are exact copies of others train"),
    )
    said = ", ".join(f"{found[kind]:,} {words}" for kind, words in kinds if found[kind])
    return f"{said or 'none'} (data.duplicates={found['mode']})"


def _percent(share: float) -> str:
    """A share in words: what is not everything is not called 100 %.

    >>> _percent(0.9999), _percent(1.0), _percent(0.0001)
    ('99.9 %', '100 %', '0.1 %')
    """
    if share in (0.0, 1.0):
        return f"{share:.0%}".replace("%", " %")
    shown = min(max(round(100 * share, 1), 0.1), 99.9)
    return f"{shown:.1f} %"


def counts_line(value: dict[str, Any]) -> str:
    """The counts that stand under the samples, in one line."""
    counts = value["counts"]
    return (
        f"to train on: {counted(counts['samples'], 'samples', ',')} of {counted(counts['tokens'], 'tokens', ',')}, "
        f"{counts['supervised_tokens']:,} supervised, {counted(counts['turns'], 'answers', ',')}; held out: "
        f"{counted(value['held_out_samples'], 'samples', ',')}; --stats says more"
    )


def text_of(value: dict[str, Any], shown: Sequence[Shown], by_token: bool) -> Group:
    """All of it. Args: value, shown: what `inspect` returns. by_token: one token a line."""
    signs, depth = signs_for(sys.stdout.encoding), value["depth"]
    parts: list[RenderableType] = [
        token_lines(each, depth) if by_token else sample_text(each, depth, signs) for each in shown
    ]
    if shown and not by_token:
        parts += [legend(shown, depth, signs), Text("")]
    return Group(*parts, page(value) if "statistics" in value else Text(counts_line(value)))
