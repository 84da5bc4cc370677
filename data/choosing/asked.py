"""Which prompts of several sources the target is asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice

from headstart.data.choosing.duplicates import content_key
from headstart.data.choosing.mixing import BY_WEIGHT, OVER_CAP, by_source, capped, counts_of, weighted
from headstart.data.config import SourceConfig
from headstart.data.prompts import Prompt, prompt_of
from headstart.data.sources.rejects import Rejects
from headstart.data.sources.sources import load_as


def read_prompts(
    sources: Sequence[SourceConfig],
    limit: int | None = None,
    rejects: Rejects | None = None,
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> list[Prompt]:
    """Prompts for distillation, by the rules of `prompt_of`, within the caps and in the shares of the sources.

    Args:
        rejects: as in `load_conversations`.
        seed: chooses prompts where a cap or a weight leaves some out.
        say: takes a line for each source that has no records, or of which a cap or a weight left some out.
    Raises: DataError for a malformed record, or one without a user turn.
    """
    skipped: Counter[int] = Counter()
    found = load_as(sources, rejects, lambda c: (c.source, (prompt_of(c), content_key(c))), skipped)
    kept: list[tuple[int, Prompt, bytes]] = []
    counts = counts_of(sources)
    for source, rows in by_source(found):
        chosen, left = capped(rows, sources[source].cap, seed)
        there = [(source, *row) for row in chosen]
        kept += there
        counts[source].read = len(there) + left
        counts[source].leave(OVER_CAP.format(sources[source].cap), left)
    used = weighted(kept, lambda row: (row[0], row[1].id, row[2]), [source.weight for source in sources], seed)
    for source, prompt, _ in kept:
        counts[source].leave(BY_WEIGHT, not used[prompt.id])
    for source, count in enumerate(counts):
        counts[source].read += skipped[source]
        if count.dropped or not count.read:
            say(count.asked(skipped[source]))
    return list(islice((prompt for _, prompt, _ in kept if used[prompt.id]), limit))
