"""Notices that another rank is gone and ends this one. Without it, a collective would wait for that rank for hours.

Rank 0 hosts a small key-value store. A thread of every rank raises a counter there once a second (its beat) and looks
at the others. A rank of the same machine counts as dead when its process is gone, a rank of another machine when its
beat has not moved for `limit_s`. A rank that fails leaves its error in the store, and the others report that instead of
a broken connection. A store that does not answer blocks the thread, so a second thread notices when the first one is
stuck.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

from headstart.heads.errors import HeadstartError
from headstart.train.sharing.distributed import gather_objects, is_distributed

#: seconds without a beat after which a rank on another machine counts as dead
LIMIT_S = 40.0
#: seconds a rank has to end by itself once another is gone
GRACE_S = 5.0
#: seconds it then has to end a write that is under way; together with LIMIT_S this is less than a minute
WRITE_S = 12.0
DONE, STOPPED, FAILED = "done", "stopped", "failed "


def machine() -> str:
    """Names this machine and its process-id namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def process_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return state not in ("Z", "X")


def ignore_sigterm() -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


class Watch:
    """While open, the ranks of this launch watch each other. A rank alone watches torchrun, if that started it.

    Args:
        limit_s: see LIMIT_S. interval_s: seconds between two beats.
        place: name of this machine; ranks with the same name can look at each other's processes.
        launcher: process id of this process's parent when it began, which is watched if it is torchrun. Other parents
            (a shell, srun) may end while ranks start; there the parent is watched that is left when the ranks have met.
    """

    def __init__(
        self,
        limit_s: float = LIMIT_S,
        interval_s: float = 1.0,
        place: str | None = None,
        launcher: int | None = None,
    ):
        self.limit_s, self.interval_s = limit_s, interval_s
        self._place = place or machine()
        self._lost = threading.Event()
        self._reason = ""
        #: exit code of a rank that ends because of another
        self.code = 1
        #: waits at most so many seconds for files being written, and returns whether there were any; the loop sets it
        self.wait_for_writes: Callable[[float], bool] = lambda seconds: False
        self._stop = threading.Event()
        self.rank = 0
        #: process id of what started this rank, None once it is gone
        self._launcher = launcher if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Watch:
        if not is_distributed():
            if self._launcher is not None:
                threading.Thread(target=self._watch_launcher, name="watch", daemon=True).start()
            return self
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        wait = timedelta(seconds=20)
        server = dist.TCPStore("0.0.0.0", 0, None, True, wait, wait_for_workers=False) if self.rank == 0 else None
        ranks = gather_objects((self._place, os.getpid(), None if server is None else server.port))
        self._pids = {r: pid for r, (place, pid, _) in enumerate(ranks) if place == self._place and r != self.rank}
        host = os.environ.get("MASTER_ADDR", "127.0.0.1") if self.rank else "127.0.0.1"
        self._server = server
        self._beats = dist.TCPStore(host, ranks[0][2], None, False, wait)  # one for the thread, one for main
        self._words = dist.TCPStore(host, ranks[0][2], None, False, wait)
        self._beats.set(f"word/{self.rank}", "")
        self._beats.set(f"beat/{self.rank}", "0")
        gather_objects(None)  # every key exists from here on
        self._rounds = 0
        self._launcher = self._launcher or os.getppid()
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._thread.start()
        if self.rank:
            threading.Thread(target=self._watch_store, name="watch-store", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._thread is None:
            self._stop.set()
            return
        if kind is not None:
            ignore_sigterm()  # a launcher that lost a rank sends it; this rank must still say why it ends
        broken = kind is not None and not issubclass(kind, HeadstartError | KeyboardInterrupt | SystemExit)
        if broken and self.reason(3.0):  # a collective failed because another rank is gone: not this rank's error
            broken = False
        word = DONE
        if kind is not None and (broken or issubclass(kind, HeadstartError)):
            word = f"{FAILED}{kind.__name__}: {error}"
        elif kind is not None and issubclass(kind, KeyboardInterrupt):
            word = STOPPED
        try:
            self._words.set(f"word/{self.rank}", word[:2000])
        except RuntimeError:
            pass  # rank 0 is gone: nobody is left to be told
        if self.rank == 0:
            self._leave_last()
        self._stop.set()
        self._thread.join(timeout=self.interval_s + 1.0)

    def _leave_last(self) -> None:
        """Rank 0 hosts the store, so it waits a few seconds for the others to leave."""
        deadline = time.monotonic() + GRACE_S
        keys = [f"word/{r}" for r in range(self.size)]
        while time.monotonic() < deadline:
            words = [word.decode() for word in self._words.multi_get(keys)]
            gone = [r for r, pid in self._pids.items() if not process_alive(pid)]
            if all(word or r in gone for r, word in enumerate(words)):
                return
            time.sleep(0.05)

    def reason(self, seconds: float) -> str:
        """Which rank is gone, and why; empty when all are there. Waits at most `seconds` to find out."""
        if self._thread is not None:
            self._lost.wait(seconds)
        return self._reason

    def _watch(self) -> None:
        seen: dict[int, tuple[str, float]] = {}
        beat = 0
        while not self._stop.wait(self.interval_s):
            beat += 1
            self._end_without_launcher()
            try:
                self._beats.set(f"beat/{self.rank}", str(beat))
                reason = self._find_lost(seen)
            except RuntimeError:
                reason = "rank 0 is gone (its store does not answer)"
                if self._stop.is_set():
                    return
            if reason:
                self._end(reason)
                return
            self._rounds += 1

    def _end_without_launcher(self) -> None:
        """Save and end, as at a SIGTERM, when the launcher was killed: nobody else would end this rank."""
        if self._launcher is not None and os.getppid() != self._launcher:
            self._launcher = None
            print(f"rank {self.rank}: the launcher is gone: saving and ending", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGTERM)

    def _watch_launcher(self) -> None:
        while not self._stop.wait(self.interval_s):
            self._end_without_launcher()

    def _watch_store(self) -> None:
        """End this rank when the other thread is stuck.

        It counts its own rounds instead of seconds, because a pause of the whole process is no fault.
        """
        seen, still = -1, 0.0
        while not self._stop.wait(self.interval_s):
            seen, still = (seen, still + self.interval_s) if self._rounds == seen else (self._rounds, 0.0)
            if still > self.limit_s and not self._lost.is_set():
                self._end(f"rank 0 has been silent for {still:.0f} s (its store does not answer)")
                return

    def _end(self, reason: str) -> None:
        """Give the main thread time to end by itself and to finish a write, then end the process."""
        self._reason = f"{reason}; this job ends here. The same command continues from the last checkpoint."
        self._lost.set()
        if self._stop.wait(GRACE_S) or (self.wait_for_writes(WRITE_S) and self._stop.wait(1.0)):
            return
        # the main thread is stuck in a collective and cannot say anything
        kind = "error: " if self.code else ""
        print(f"rank {self.rank}: {kind}{self._reason}", file=sys.stderr, flush=True)
        os._exit(self.code)

    def _find_lost(self, seen: dict[int, tuple[str, float]]) -> str:
        """Why this job cannot go on; empty when all ranks are there.

        Args: seen: rank → its last beat, and when that was first seen.
        """
        others = [r for r in range(self.size) if r != self.rank]
        words = dict(zip(others, self._beats.multi_get([f"word/{r}" for r in others]), strict=True))
        for r, word in words.items():
            if word.decode().startswith(FAILED):
                return f"rank {r} failed: {word.decode()[len(FAILED) :]}"
            if word.decode() == STOPPED:
                self.code = 0
                return f"rank {r} was stopped by a signal"
        open_ranks = [r for r in others if not words[r]]
        for r in open_ranks:
            if r in self._pids and not process_alive(self._pids[r]):
                return f"rank {r} died (process {self._pids[r]} on this machine)"
        now = time.monotonic()
        beats = self._beats.multi_get([f"beat/{r}" for r in open_ranks]) if open_ranks else []
        for r, beat in zip(open_ranks, beats, strict=True):
            if r not in seen or seen[r][0] != beat.decode():
                seen[r] = (beat.decode(), now)
            elif now - seen[r][1] > self.limit_s:
                return f"rank {r} has been silent for {now - seen[r][1]:.0f} s"
        return ""
