"""What is trained on, and in which order: one global sequence of packs, the same for any number of ranks.

Worked example: 5 packs per epoch, `accumulation` 2, two ranks.

    global pack      0    1    2    3    4    5    6    7
    epoch/index     0/0  0/1  0/2  0/3  0/4  1/0  1/1  1/2
    step (window)    0    0    1    1    2    2    3    3
    rank             0    1    0    1    0    1    0    1

A window may span two epochs, so every step has exactly `accumulation` packs; the last step of a run may have fewer.

PackStream is that sequence, Fetcher gets the features of its packs, WindowFeed gives every rank its part of a window.
"""

from __future__ import annotations

import hashlib
import math
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from headstart.data.features import FeatureSource
from headstart.data.packing import make_packs
from headstart.heads.base import Head
from headstart.heads.batch import FeatureBatch
from headstart.heads.errors import ConfigError, DataError, HeadstartError, TrainingError
from headstart.train.config import TrainConfig

#: (lengths, budget in tokens, seed, epoch) → packs of sample indices; called with `supervised=` where that is known
MakePacks = Callable[..., list[list[int]]]


@dataclass(frozen=True)
class TrainData:
    """What a head is trained on.

    Attributes:
        source: features of the samples; their lengths and `pack_tokens` decide the packs.
        pack_tokens: largest number of tokens of a pack (a longer document has a pack of its own).
        supervised: supervised tokens of every training sample: packs then hold equally many of them, so that ranks
            finish together; None = balance tokens alone.
        make_packs: puts the samples of an epoch into packs.
    """

    source: FeatureSource
    pack_tokens: int = 4096
    supervised: Sequence[int] | None = None
    make_packs: MakePacks = make_packs


@dataclass(frozen=True)
class Pack:
    """One micro-batch: its place in the global order and the indices of its samples."""

    epoch: int
    index: int
    samples: tuple[int, ...]

    @property
    def place(self) -> str:
        return f"epoch {self.epoch}, pack {self.index}"


class PackStream:
    """The global sequence of packs, addressed by number.

    Args:
        lengths: tokens of every training sample.
        pack_tokens, make_packs, supervised: see TrainData.
        seed: seeds the order of every epoch.
    Raises: DataError when there is nothing to train on.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        pack_tokens: int,
        seed: int,
        make_packs: MakePacks = make_packs,
        supervised: Sequence[int] | None = None,
    ):
        if not len(lengths):
            raise DataError("no training samples: none given or all dropped; see `headstart inspect`")
        self.lengths, self.pack_tokens, self.seed, self._make_packs = lengths, pack_tokens, seed, make_packs
        self.supervised = supervised
        self._epochs = [0]  # first global pack number of every epoch known so far, then the next one's
        self._cached: dict[int, list[list[int]]] = {}

    def fingerprint(self) -> str:
        """Hash of what fixes the order besides the seed; a checkpoint resumes only with the same one."""
        counts = [self.lengths] if self.supervised is None else [self.lengths, self.supervised]
        content = b"".join(np.asarray(x, dtype=np.int64).tobytes() for x in counts)
        return hashlib.sha256(b"spread" + content + str(self.pack_tokens).encode()).hexdigest()[:16]

    def epoch_packs(self, epoch: int) -> list[list[int]]:
        if epoch not in self._cached:
            while len(self._cached) > 1:  # a window and those fetched ahead rarely touch more than two epochs
                del self._cached[min(self._cached)]
            counts = {} if self.supervised is None else {"supervised": self.supervised}
            self._cached[epoch] = self._make_packs(self.lengths, self.pack_tokens, self.seed, epoch, **counts)
        return self._cached[epoch]

    def _start(self, epoch: int) -> int:
        """Global number of the epoch's first pack."""
        while len(self._epochs) <= epoch:
            self._epochs.append(self._epochs[-1] + len(self.epoch_packs(len(self._epochs) - 1)))
        return self._epochs[epoch]

    def count(self, epochs: float) -> int:
        """Packs in this many epochs; a fraction takes that part of the last one, at least one pack."""
        whole = math.floor(epochs)
        total = self._start(whole)
        if epochs > whole:
            total += round((epochs - whole) * len(self.epoch_packs(whole)))
        return max(total, 1)

    def locate(self, number: int) -> Pack:
        """The pack of this global number."""
        epoch = bisect_right(self._epochs, number) - 1
        while self._start(epoch + 1) <= number:
            epoch += 1
        index = number - self._start(epoch)
        return Pack(epoch, index, tuple(self.epoch_packs(epoch)[index]))

    def window(self, start: int, count: int) -> list[Pack]:
        """`count` consecutive packs from global number `start`."""
        return [self.locate(number) for number in range(start, start + count)]


def busy_share(accumulation: int, ranks: int) -> float:
    """Share of the ranks' time in which they have a pack; 1 where every rank has equally many.

    Example: 2 ranks take two rounds for 3 packs. One of them has no pack in the second: 3 of 4 places, 0.75.
    """
    return accumulation / (math.ceil(accumulation / ranks) * ranks)


def idle_note(accumulation: int, ranks: int) -> str | None:
    """What to tell a user whose ranks wait for one another; None where all have equally many packs."""
    busy = busy_share(accumulation, ranks)
    if busy == 1.0:
        return None
    return (
        f"train.accumulation={accumulation} over {ranks} ranks leaves ranks idle {1 - busy:.0%} of the time: "
        f"a multiple of {ranks}, such as {math.ceil(accumulation / ranks) * ranks}, keeps all busy"
    )


def pack_seed(seed: int, pack: Pack, purpose: str = "") -> int:
    """A seed that depends on the run's seed, the pack and the purpose alone: not on ranks, not on restarts."""
    digest = hashlib.blake2b(f"{seed}/{pack.epoch}/{pack.index}{purpose}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_pack(seed: int, pack: Pack) -> None:
    """Seed torch's generators for one pack, so that its noise does not depend on ranks or restarts."""
    torch.manual_seed(pack_seed(seed, pack))


def choose_rows(head: Head, batch: FeatureBatch, seed: int, pack: Pack) -> FeatureBatch:
    """The rows of the pack that this step trains (Head.choose_rows), the same on any rank and after any restart."""
    return head.choose_rows(batch, pack_seed(seed, pack, "/rows"))


@contextmanager
def naming_samples(
    source: FeatureSource, samples: Sequence[int] | None, place: str | None, alone: bool = False
) -> Iterator[None]:
    """Turn a failure inside, whatever it is, into a TrainingError that names the samples. Our own errors pass.

    Args:
        samples, place: of the pack whose features are made; None where this rank has no pack.
        alone: whether this rank may fetch the samples one by one, to name only those that fail.
    """
    try:
        yield
    except HeadstartError:
        raise
    except Exception as error:
        if samples is None:
            raise
        culprits = [sample for sample in samples if _fails(source, sample)] if alone else []
        known = source.sample_ids
        names = [known[i] if i < len(known) else f"number {i}" for i in culprits or samples]
        raise TrainingError(
            f"features of {'sample' if len(names) == 1 else 'samples'} {', '.join(names)} ({place}) failed: "
            f"{type(error).__name__}: {error}"
        ) from error


def _fails(source: FeatureSource, sample: int) -> bool:
    try:
        source.get([sample])
    except Exception:
        return True
    return False


class Fetcher:
    """Gets the features of packs; a background thread can get some ahead of time. Errors name the samples.

    Args: ahead: windows that are fetched ahead; 0 = no thread.
    Attributes: lockstep: whether all ranks must fetch at the same time (a sharded target).
    """

    def __init__(self, source: FeatureSource, ahead: int):
        self._source = source
        self.lockstep = source.lockstep
        if ahead and self.lockstep:
            raise ConfigError(
                f"train.prefetch: found {ahead} with a sharded target, whose ranks fetch together: set train.prefetch=0"
            )
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="features") if ahead else None
        self._pending: dict[Pack, Future[FeatureBatch]] = {}

    def window(self, packs: list[Pack], rank: int, size: int) -> list[FeatureBatch]:
        """This rank's batches of a window: packs rank, rank + size, … of it."""
        if not self.lockstep:
            return [self.get(pack) for pack in packs[rank::size]]
        batches = []
        for first in range(0, len(packs), size):
            together = packs[first : first + size]
            mine = together[rank] if rank < len(together) else None
            lists = [list(pack.samples) for pack in together]
            samples, place = (None, None) if mine is None else (mine.samples, mine.place)
            with naming_samples(self._source, samples, place):
                batch = self._source.get_together(lists, rank)
            if batch is not None:
                batches.append(batch)
        return batches

    def again(self, pack: Pack) -> FeatureBatch | None:
        """The features of a pack once more, for an error's report; None where ranks can only fetch together."""
        return None if self.lockstep else self._get(pack)

    def _get(self, pack: Pack) -> FeatureBatch:
        with naming_samples(self._source, pack.samples, pack.place, alone=True):
            return self._source.get(list(pack.samples))

    def prefetch(self, packs: list[Pack]) -> None:
        if self._pool is not None:
            for pack in packs:
                if pack not in self._pending:
                    self._pending[pack] = self._pool.submit(self._get, pack)

    def get(self, pack: Pack) -> FeatureBatch:
        future = self._pending.pop(pack, None)
        return self._get(pack) if future is None else future.result()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


@dataclass
class Window:
    """The packs of one optimiser step.

    Attributes:
        packs: of all ranks, in the global order.
        places: where this rank's packs are among them.
        batches: the features of this rank's packs, on its device; the rows that training runs.
    """

    packs: list[Pack]
    places: list[int]
    batches: list[FeatureBatch] = field(default_factory=list)

    @property
    def own(self) -> list[Pack]:
        """This rank's packs."""
        return [self.packs[place] for place in self.places]


class WindowFeed:
    """The windows of a run with this rank's features.

    Args:
        last_pack: packs of the whole run, after which the last window is cut off; None = no limit.
        head: chooses the rows that training runs.
        device_idle: whether the device has nothing to do, so that time spent here is time lost.
    Attributes:
        weigh: changes how much the drafts of a pack count, before its rows are chosen (Rounds.weigh).
    """

    def __init__(
        self, stream: PackStream, fetcher: Fetcher, config: TrainConfig, last_pack: int | None, head: Head,
        rank: int, size: int, device: torch.device, device_idle: Callable[[], bool],
    ):  # fmt: skip
        self.stream, self.fetcher, self._config, self._last_pack, self._head = stream, fetcher, config, last_pack, head
        self._rank, self._size, self._device, self._device_idle = rank, size, device, device_idle
        self.weigh: Callable[[FeatureBatch, Sequence[int]], FeatureBatch] = lambda batch, samples: batch
        self._next: Window | None = None
        self._waited = 0.0

    def take(self, start: int) -> Window:
        """The window that begins at global pack `start`; later ones are asked for in the background."""
        window, self._next = self._next, None
        if window is None:
            window = self._fetch(start)
        for ahead in range(1, self._config.prefetch + 1):
            self.fetcher.prefetch(self._empty(start + ahead * self._config.accumulation).own)
        return window

    def fetch_next(self, start: int) -> None:
        """Make the features of the window at `start` now, which the next `take` returns."""
        self._next = self._fetch(start)

    def take_waited(self) -> float:
        """Seconds for which fetching left the device idle since the last call."""
        waited, self._waited = self._waited, 0.0
        return waited

    def _empty(self, start: int) -> Window:
        """The window that begins at global pack `start`, before anything is fetched."""
        count = self._config.accumulation
        if self._last_pack is not None:
            count = max(min(count, self._last_pack - start), 0)
        return Window(self.stream.window(start, count), list(range(self._rank, count, self._size)))

    def _fetch(self, start: int) -> Window:
        window = self._empty(start)
        began = time.perf_counter()
        fetched = self.fetcher.window(window.packs, self._rank, self._size)
        on_device = [batch.to(self._device, non_blocking=True) for batch in fetched]
        head, seed, pairs = self._head, self._config.seed, zip(on_device, window.own, strict=True)
        weighed = ((self.weigh(batch, pack.samples), pack) for batch, pack in pairs)
        window.batches = [choose_rows(head, batch, seed, pack) for batch, pack in weighed]
        # fetching costs nothing while the device still works on what came before
        self._waited += time.perf_counter() - began if self._device_idle() else 0.0
        return window
