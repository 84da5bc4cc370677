"""Which samples train and which are held out, in the end: after copies left and weights chose."""

from __future__ import annotations

from dataclasses import replace

from headstart.data.choosing.gather import HELD_OUT_COPY, HELD_OUT_TEXT, Gathered, conversation_of
from headstart.data.choosing.split import Split, given_held_out, prompts_of, rule_of, split_held_out
from headstart.data.config import DataConfig
from headstart.data.samples import Sample, require_supervised
from headstart.heads.errors import DataError

#: if more than this share of the training conversations are near copies of those few that were split off, the whole log
#: is alike (one long question with another number in it), and none leaves
MOST_COPIES = 0.5


def separate(
    samples: list[Sample],
    held_out: list[Sample] | None,
    gathered: Gathered,
    held_gathered: Gathered | None,
    config: DataConfig,
    seed: int,
) -> Split:
    """Both sides: split by the first prompt, near copies left out of training, mixed by the weights.

    Args:
        held_out: of `data.held_out`; None holds out a fraction of `samples`.
        gathered, held_gathered: what gathered the two; their counts are completed.
    Raises: DataError where nothing is left to train on.
    """
    if held_out is None:
        split = split_held_out(samples, config.held_out_fraction, seed)
    else:
        split = given_held_out(samples, held_out)
    of_held = held_gathered or gathered
    kept = set(map(conversation_of, split.train if split.given else (*split.train, *split.held_out)))
    gathered.left_out(samples, set(map(conversation_of, samples)) - kept, HELD_OUT_TEXT)
    split = _without_near_copies(split, gathered, of_held, config)
    if not split.train:
        raise DataError(
            f"data: all samples to train on ({len(split.copies) + len(split.near_copies)}) repeat held-out text "
            f"({', '.join([*split.copies, *split.near_copies][:3])}): give other conversations to train on, or to hold "
            "out (data.held_out)"
        )
    train = gathered.mixed(split.train, config.most_repeats)
    held = of_held.mixed(split.held_out)
    gathered.count_trained(train)
    of_held.count_held_out(held)
    require_supervised(train)
    shared = len(prompts_of(train) & prompts_of(held))
    return replace(split, train=train, held_out=held, held_out_prompts=len(prompts_of(held)), shared_prompts=shared)


def _without_near_copies(split: Split, gathered: Gathered, of_held: Gathered, config: DataConfig) -> Split:
    """The split without the training conversations that are near copies of held-out ones."""
    split = replace(split, rule=rule_of(config.duplicates))
    copies = gathered.near_copies(split.train, split.held_out, of_held)
    all_alike = len(copies) > MOST_COPIES * len(set(map(conversation_of, split.train)))
    if all_alike and not split.given and config.duplicates != "near":
        return replace(split, alike=len(copies))
    return replace(split, train=gathered.left_out(split.train, copies, HELD_OUT_COPY), near_copies=copies)
