"""Asks several servers at once, and again where one fails: bounded requests each, back-off, servers set aside.

A request that fails waits and is sent again, to another server where there is one. A server that fails several times in
a row is set aside for a while; then one request tries it. Failures of requests that were sent before the last failure
count once, because one cause has failed them all.
"""

from __future__ import annotations

import asyncio
import queue
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from headstart.data.serving.engines import TABLE
from headstart.data.serving.http import Connection, StatusError, UnreachedError, httpx2
from headstart.data.serving.reply import Reply, read_reply
from headstart.heads.errors import ServerError, first_line

#: HTTP status that refuses this request, whichever server of this kind is asked again
REFUSED = (400, 413, 422)
#: HTTP status of a server that has too much to do
BUSY = (429, 503)
#: most bytes of an answer: BODY + tokens · (PER_TOKEN + PER_LOGPROB · log-probabilities per token)
BODY, PER_TOKEN, PER_LOGPROB = 4 << 20, 4 << 10, 1 << 10


@dataclass(frozen=True)
class Patience:
    """How long a server may take, and how often it is asked.

    Attributes:
        timeout_s: for a whole answer.
        tries: of one request.
        first_s, longest_s: wait before the second try, which doubles with each further one, and its bound.
        failures: in a row, until a server is set aside.
        aside_s, longest_aside_s: how long it is, which doubles with each further failure, and its bound.
        give_up_s: a server that has failed for so long is down.
    """

    timeout_s: float = 600.0
    tries: int = 5
    first_s: float = 0.5
    longest_s: float = 60.0
    failures: int = 3
    aside_s: float = 15.0
    longest_aside_s: float = 60.0
    give_up_s: float = 300.0


class Server:
    """One server, and how it has done so far.

    Args:
        where: its recipe key, for messages.
        engine: a key of engines.TABLE.
        concurrency: most requests that it gets at once.
    Attributes:
        in_flight: requests that it has.
        usable_at: clock reading until which it is left alone.
        failures: in a row.
        failing_since: clock reading of the first of them.
        aside: whether it is set aside.
        down: whether it failed for longer than is waited for.
        cause: of the last failure.
        notes: what people should know of it.
    """

    def __init__(self, where: str, connection: Connection, model: str, engine: str, concurrency: int):
        self.where, self.connection, self.model, self.engine = where, connection, model, engine
        self.concurrency = concurrency
        self.in_flight = 0
        self.usable_at = self.failed_at = float("-inf")
        self.failures = 0
        self.failing_since: float | None = None
        self.aside = self.down = False
        self.cause = ""
        self.notes: list[str] = []

    @property
    def url(self) -> str:
        return self.connection.url

    def describe(self) -> str:
        """What it is, for people."""
        what = f"{self.url} ({TABLE[self.engine].title}) serves {self.model}, {self.concurrency} requests at once"
        return "; ".join([what, *self.notes])

    def has_room(self, now: float) -> bool:
        """Whether it may get a request now. While it is set aside, one request at a time tries it."""
        return now >= self.usable_at and self.in_flight < (1 if self.aside else self.concurrency)


@dataclass(frozen=True)
class Outcome:
    """What became of a request: an answer, or why there is none."""

    tag: Any
    reply: Reply | None
    server: Server | None
    failed: str | None = None


@dataclass(frozen=True)
class Asked:
    """A request in work. `build(server)` gives its path and body, or says in text why this server cannot be asked."""

    tag: Any
    build: Callable[[Server], tuple[str, dict[str, Any]] | str]
    limit: int
    top_logprobs: int


class Pool:
    """A context manager that keeps requests in flight, in a thread of its own.

    Args: say: gets a line when a server is set aside, and when it answers again.
    """

    def __init__(self, servers: Sequence[Server], patience: Patience, say: Callable[[str], None], seed: int = 0):
        self.servers, self.patience, self.say = list(servers), patience, say
        self.capacity = sum(server.concurrency for server in servers)
        self.open = 0
        self._random = random.Random(seed)
        self._finished: queue.SimpleQueue[Outcome | BaseException] = queue.SimpleQueue()
        self._said: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._waiting: set[asyncio.Future[None]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._webs: dict[Server, httpx2.AsyncClient] = {}

    def __enter__(self) -> Pool:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="headstart-servers", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._tell()

    @property
    def room(self) -> int:
        """How many more requests may be submitted."""
        return max(self.capacity - self.open, 0)

    def submit(self, asked: Asked) -> None:
        self.open += 1
        self._loop.call_soon_threadsafe(self._start, asked)

    def next(self) -> Outcome:
        """The next request that is finished. Raises: ServerError where every server is down."""
        while True:
            self._tell()
            try:
                outcome = self._finished.get(timeout=1.0)  # what is said meanwhile is told in time
            except queue.Empty:
                continue
            self._tell()
            if isinstance(outcome, BaseException):
                raise outcome
            self.open -= 1
            return outcome

    def _tell(self) -> None:
        while not self._said.empty():
            self.say(self._said.get())

    def _start(self, asked: Asked) -> None:
        task = self._loop.create_task(self._work(asked))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for web in self._webs.values():
            await web.aclose()

    async def _work(self, asked: Asked) -> None:
        try:
            outcome: Outcome | BaseException = await self._answer(asked)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            outcome = error
        self._finished.put(outcome)

    async def _answer(self, asked: Asked) -> Outcome:
        """Ask until a server answers, all refuse it, or the tries are used up. Raises: ServerError where all are down.

        A server that cannot be reached has not tried the request; one that is busy asks for patience. Both are bounded
        by `give_up_s`.
        """
        refused: dict[Server, str] = {}
        last: Server | None = None
        tries = 0
        while True:
            server = await self._claim(refused, last)
            if server is None:
                return Outcome(asked.tag, None, None, "; ".join(dict.fromkeys(refused.values())))
            sent_at = self._loop.time()
            try:
                request = asked.build(server)
                if isinstance(request, str):
                    refused[server] = f"{server.url}: {request}"
                    continue
                reply = await self._ask(server, *request, asked)
            except ServerError as error:
                if isinstance(error, StatusError) and error.status in REFUSED:
                    refused[server] = first_line(error)
                    continue
                self._failed(server, error, sent_at)
                busy = isinstance(error, StatusError) and error.status in BUSY
                tries += not (busy or isinstance(error, UnreachedError))
                if tries >= self.patience.tries:
                    return Outcome(asked.tag, None, server, f"failed {tries} times; the last time: {first_line(error)}")
                last = server
            else:
                self._succeeded(server, sent_at)
                return Outcome(asked.tag, reply, server)
            finally:
                server.in_flight -= 1
                self._wake()
            await asyncio.sleep(self._wait(tries or 1))

    async def _ask(self, server: Server, path: str, body: dict[str, Any], asked: Asked) -> Reply:
        connection, where = server.connection, server.url + path
        if server not in self._webs:
            self._webs[server] = connection.web()
        most = BODY + asked.limit * (PER_TOKEN + PER_LOGPROB * asked.top_logprobs)
        content, seconds = bytearray(), self.patience.timeout_s

        def late() -> str:
            return f"no whole answer within {seconds:g} s (data.distill.server_timeout)"

        async with connection.answer(self._webs[server], path, body, seconds, late) as (response, _):
            async for chunk in response.aiter_raw():
                content += chunk
                if len(content) > most:
                    raise ServerError(f"{where}: the answer is longer than {most} bytes")
        return read_reply(bytes(content), where, asked.limit, asked.top_logprobs)

    async def _claim(self, refused: dict[Server, str], last: Server | None) -> Server | None:
        """A server with room, the one that failed last only if no other has; None where all that are up refused."""
        while True:
            now = self._loop.time()
            self._require_some()
            others = [server for server in self.servers if server not in refused]
            if refused and all(server.down for server in others):
                return None
            ready = [server for server in others if server.has_room(now)]
            if ready:
                chosen = min(ready, key=lambda server: (server is last, server.in_flight / server.concurrency))
                chosen.in_flight += 1
                return chosen
            soonest = min((s.usable_at - now for s in others if s.usable_at > now), default=None)
            await self._until_woken(soonest)

    def _require_some(self) -> None:
        """Raises: ServerError where every server is down."""
        if all(server.down for server in self.servers):
            causes = "; ".join(server.cause for server in self.servers)
            raise ServerError(
                f"data.distill.servers: none of {len(self.servers)} has answered for {self.patience.give_up_s:g} s "
                f"(data.distill.server_patience): {causes}. Every finished answer is kept. Start the servers again or "
                "name others, then run the same command: it asks only for what is missing"
            )

    async def _until_woken(self, seconds: float | None) -> None:
        """Wait for a change of any server, at most so long."""
        woken = self._loop.create_future()
        self._waiting.add(woken)
        try:
            async with asyncio.timeout(None if seconds is None else max(seconds, 0.001)):
                await woken
        except TimeoutError:
            pass
        finally:
            self._waiting.discard(woken)

    def _wake(self) -> None:
        for woken in self._waiting:
            if not woken.done():
                woken.set_result(None)

    def _wait(self, count: int, first: float | None = None, longest: float | None = None) -> float:
        """Seconds before try number `count` + 1: they double, by chance half as much more or less."""
        first = self.patience.first_s if first is None else first
        bound = self.patience.longest_s if longest is None else longest
        return min(first * 2 ** min(count - 1, 30), bound) * self._random.uniform(0.5, 1.5)

    def _failed(self, server: Server, error: ServerError, sent_at: float) -> None:
        now, patience = self._loop.time(), self.patience
        server.cause = first_line(error)
        if sent_at >= server.failed_at:
            server.failures += 1
            server.failed_at = now
        server.failing_since = now if server.failing_since is None else server.failing_since
        busy = isinstance(error, StatusError) and error.status in BUSY
        if busy or isinstance(error, UnreachedError):
            asked_for = error.retry_after if isinstance(error, StatusError) else None
            wait = self._wait(server.failures) if asked_for is None else asked_for
            server.usable_at = max(server.usable_at, now + wait)
        if server.failures >= patience.failures and not busy:
            again = server.failures - patience.failures + 1
            wait = self._wait(again, patience.aside_s, patience.longest_aside_s)
            server.usable_at = max(server.usable_at, now + wait)
            if not server.aside:
                server.aside = True
                self._said.put(
                    f"{server.url} failed {server.failures} times in a row and is set aside for {wait:.0f} s, then "
                    f"tried again: {server.cause}"
                )
        since = now - server.failing_since
        if server.failures >= patience.failures and since >= patience.give_up_s and not server.down:
            server.down = True
            self._said.put(
                f"{server.url} has not answered for {since:.0f} s; others go on, and it is tried now and then"
            )

    def _succeeded(self, server: Server, sent_at: float) -> None:
        if sent_at < server.failed_at:
            return  # it was sent before the last failure, so it says nothing of the server as it is now
        if server.aside or server.down:
            self._said.put(f"{server.url} answers again")
        server.failures, server.failing_since, server.usable_at = 0, None, float("-inf")
        server.aside = server.down = False
