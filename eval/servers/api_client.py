"""Streamed answers of an OpenAI-compatible server, with the clock readings that a measurement needs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from headstart.data.serving.http import Connection, httpx2, run_here
from headstart.eval.servers.answers import Lines, Served
from headstart.heads.errors import ServerError

#: most seconds until an answer's next token; a whole answer of n tokens may take PATIENCE + n · PER_TOKEN
PATIENCE, PER_TOKEN = 600.0, 2.0
#: most bytes of an answer of n tokens: STREAM + n · TOKEN_BYTES
TOKEN_BYTES, STREAM = 64 << 10, 4 << 20


class Client(Connection):
    """A connection that streams answers."""

    def generate(self, requests: Sequence[tuple[str, dict[str, Any]]]) -> list[Served]:
        """Stream the answers to `requests`, (path, body) each, all sent at once.

        Raises: ServerError of the first that is refused, breaks off, takes too long or is not complete; the others are
            cancelled.
        """

        async def all_of_them() -> list[Served]:
            async with self.web() as web:
                try:
                    async with asyncio.TaskGroup() as group:
                        tasks = [group.create_task(self._stream(web, path, body)) for path, body in requests]
                except ExceptionGroup as errors:
                    raise errors.exceptions[0] from None
            return [task.result() for task in tasks]

        return run_here(all_of_them())

    async def _stream(self, web: httpx2.AsyncClient, path: str, body: dict[str, Any]) -> Served:
        where, limit, clock = self.url + path, body["max_tokens"], asyncio.get_running_loop().time
        options = {"include_usage": True, "continuous_usage_stats": True}
        asked = {**body, "stream": True, "stream_options": options}
        answer, lines, taken = Served(limit, sent=time.perf_counter()), Lines(where), 0
        whole_s, most = PATIENCE + PER_TOKEN * limit, STREAM + TOKEN_BYTES * limit
        end = clock() + whole_s

        def late() -> str:
            if clock() >= end:
                return f"{answer.tokens} of {limit} tokens came within {whole_s:g} s"
            return f"{answer.tokens} tokens came, and no further one within {PATIENCE:g} s"

        async with self.answer(web, path, asked, PATIENCE, late) as (response, deadline):
            async for chunk in response.aiter_raw():
                taken += len(chunk)
                if taken > most:
                    raise ServerError(f"{where}: the stream is longer than {most} bytes for {answer.tokens} tokens")
                for line in lines.feed(chunk):
                    if answer.read(line, where):
                        deadline.reschedule(min(clock() + PATIENCE, end))
                    if answer.done:
                        break
                if answer.done:
                    break
        answer.check(where)
        return answer
