"""Duplicates: exact ones by content, near ones by MinHash, and near copies of what is held out.

Two conversations are near copies if their likeness (`shingles.py`) reaches a threshold. MinHash only proposes pairs of
near duplicates; each pair is then compared exactly. Copies of held-out conversations are found without it, all of them.
"""

from __future__ import annotations

import hashlib
import json
import math
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from headstart.data.choosing.shingles import likeness
from headstart.data.records.conversation import Conversation
from headstart.data.records.messages import folded
from headstart.heads.errors import DataError

#: MinHash functions per conversation. The estimate of a likeness of 0.8 then has a standard deviation of 0.036
FUNCTIONS = 126
#: a pair with an estimate this far below the threshold is not compared: four standard deviations
SLACK = 0.15
#: greatest probability of missing a pair whose likeness is the threshold itself. More alike pairs are missed less
MISSED = 0.001
#: hashes of one set that the library takes at once; it holds FUNCTIONS values of each
PART = 1 << 14
#: most proposals for one set whose likeness is estimated (those that share most bands with it), and most that are
#: compared (those with the highest estimates). More come only where thousands of conversations are nearly near copies
PROPOSED, COMPARED = 2048, 128
#: from so many entries on, sets are counted in a table of all sets instead of being sorted
MANY = 4096


def content_key(conversation: Conversation) -> bytes:
    """Digest of what a conversation says: its messages with white space folded, its tools and template variables.

    A record without messages counts by its token ids.
    """
    if conversation.messages:
        said: Any = [{key: folded(value) for key, value in m.items()} for m in conversation.messages]
    else:
        said = [[turn.prompt_ids, turn.response_ids] for turn in conversation.turns] or conversation.prompt_token_ids
    content = [said, conversation.tools, conversation.template_kwargs]
    text = json.dumps(content, ensure_ascii=False, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def require_minhash() -> Any:
    """The library's MinHash. Raises: DataError where it is not installed."""
    try:
        from datasketch import MinHash
    except ImportError as error:
        raise DataError(
            f"data.duplicates=near needs the package datasketch ({error}): pip install 'headstart[near]' or "
            "pip install datasketch; or set data.duplicates=exact"
        ) from error
    return MinHash


def bands(threshold: float) -> tuple[int, int]:
    """How many bands, of how many MinHash values each. Bands of more values propose fewer pairs, and miss more."""
    fits = [r for r in range(1, 16) if (1 - threshold**r) ** (FUNCTIONS // r) <= MISSED]
    rows = max(fits, default=1)
    return FUNCTIONS // rows, rows


def near_duplicates(sets: Callable[[int], np.ndarray], count: int, threshold: float) -> dict[int, int]:
    """Which of `count` sets leave so that no two that stay are near copies: number → the one that it is a copy of.

    The first stays. A set leaves only if it is a copy of one that stays, so in a chain of copies every other one may
    stay.
    Args: sets: number → its hashes.
    Raises: DataError without the library.
    """
    signature_NP = _signatures(sets, count)
    number, rows = bands(threshold)
    groups_NB = np.stack([_groups(signature_NP[:, rows * band : rows * (band + 1)]) for band in range(number)], axis=1)
    # what stays, by band and group
    staying: dict[tuple[int, int], array[int]] = defaultdict(lambda: array("q"))
    copies: dict[int, int] = {}
    for one in range(count):
        mine = [(band, group) for band, group in enumerate(groups_NB[one].tolist()) if group >= 0]
        proposed = _proposed([np.frombuffer(staying[place], np.int64) for place in mine if place in staying])
        original = _first_like(one, proposed, signature_NP, sets, threshold) if len(proposed) else None
        if original is None:
            for place in mine:
                staying[place].append(one)
        else:
            copies[one] = original
    return copies


def _proposed(groups: Sequence[np.ndarray]) -> np.ndarray:
    """The numbers that are in the groups, in order; at most PROPOSED, those that are in most groups."""
    found = np.concatenate([np.empty(0, np.int64), *groups])
    if len(found) < MANY:
        others, shared = np.unique(found, return_counts=True)
    else:
        table = np.bincount(found)
        others = np.flatnonzero(table)
        shared = table[others]
    if len(others) > PROPOSED:
        others = np.sort(others[np.argpartition(-shared, PROPOSED)[:PROPOSED]])
    return others


def _first_like(
    one: int, others: np.ndarray, signature_NP: np.ndarray, sets: Callable[[int], np.ndarray], threshold: float
) -> int | None:
    estimates = (signature_NP[others] == signature_NP[one]).mean(1)
    others, estimates = others[estimates >= threshold - SLACK], estimates[estimates >= threshold - SLACK]
    if len(others) > COMPARED:
        others = np.sort(others[np.argpartition(-estimates, COMPARED)[:COMPARED]])
    mine = sets(one)
    for other in others.tolist():
        if likeness(mine, sets(other)) >= threshold:
            return other
    return None


def _signatures(sets: Callable[[int], np.ndarray], count: int) -> np.ndarray:
    """MinHash values: uint32 [N, P]."""
    empty = require_minhash()(num_perm=FUNCTIONS, hashfunc=lambda value: value, seed=1)
    signature_NP = np.empty((count, FUNCTIONS), np.uint32)
    for number in range(count):
        made, values = empty.copy(), sets(number).tolist()
        for start in range(0, len(values), PART):
            made.update_batch(values[start : start + PART])
        signature_NP[number] = made.hashvalues
    return signature_NP


def _groups(band_Nr: np.ndarray) -> np.ndarray:
    """Number of the group of equal rows that each row belongs to, -1 for a row that equals no other: int64 [N]."""
    rows = np.ascontiguousarray(band_Nr)
    _, group_N, sizes = np.unique(
        rows.view(np.dtype((np.void, rows.dtype.itemsize * rows.shape[1]))).ravel(),
        return_inverse=True,
        return_counts=True,
    )
    return np.where(sizes[group_N] > 1, group_N, -1)


class Originals:
    """Finds whether a conversation is a near copy of one of these sets. Exact: it misses none and invents none.

    Of two sets that are near copies, one's rarest hashes hold at least one that is in the other. So only the sets that
    hold those are compared.
    """

    def __init__(self, sets: Sequence[np.ndarray], threshold: float):
        self.sets, self.threshold = sets, threshold
        self._sizes = np.array([len(each) for each in sets], np.int64)
        values = np.concatenate([np.empty(0, np.uint32), *sets])
        order = np.argsort(values, kind="stable")
        self._owners = np.repeat(np.arange(len(sets)), self._sizes)[order]
        self._values, starts = np.unique(values[order], return_index=True)
        self._starts = np.append(starts, len(values))

    def copied_by(self, mine: np.ndarray) -> int | None:
        """Number of the first set that `mine` (sorted hashes) is a near copy of, or None."""
        if not len(mine) or not len(self._values):
            return None
        at = np.searchsorted(self._values, mine)
        at = at[self._values[np.minimum(at, len(self._values) - 1)] == mine]
        needed = max(math.ceil(self.threshold * len(mine) - 1e-6), 1)
        if len(at) < needed:
            return None
        # at most len(mine) - needed hashes of `mine` may be missing in the other, so one more holds a shared one; those
        # that are in no set are the rarest
        holders = self._starts[at + 1] - self._starts[at]
        order = np.argsort(holders, kind="stable")[: len(at) - needed + 1]
        rarest, holders = at[order], holders[order]
        if holders.sum() >= MANY:  # common words alone are left: compare with all sets at once
            both = np.bincount(self._owners_of(at), minlength=len(self.sets))
            like = np.flatnonzero(both / (self._sizes + len(mine) - both) >= self.threshold)
            return int(like[0]) if len(like) else None
        owners = np.unique(self._owners_of(rarest))
        sizes = self._sizes[owners]
        fits = (sizes >= needed) & (sizes * self.threshold <= len(mine) + 1e-6)
        for owner in owners[fits].tolist():
            if likeness(mine, self.sets[owner]) >= self.threshold:
                return owner
        return None

    def _owners_of(self, values: np.ndarray) -> np.ndarray:
        """The sets that hold each of these hashes (given by their places), one after another."""
        return np.concatenate([self._owners[self._starts[i] : self._starts[i + 1]] for i in values.tolist()])
