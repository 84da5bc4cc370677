"""A server that misbehaves: a good one, of which single pages are answered by bytes and pauses of any kind."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from fake_server import Handler, State, serving

#: seconds after which a fault ends by itself, whatever the client does
END = 8.0
#: what is sent: bytes, and pauses in seconds
Pieces = Iterable[bytes | float]
#: what answers a path, given what the server has done so far; None = it answers well this time
Fault = Callable[[State], Pieces | None]

STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def http(body: bytes | Any, status: str = "200 OK", *headers: str, length: int | None = None) -> bytes:
    """A whole answer; `length` is a lie about it."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = [f"HTTP/1.1 {status}", f"Content-Length: {len(content) if length is None else length}", *headers]
    return "\r\n".join([*head, "Connection: close", "", ""]).encode() + content


def event(tokens: Any = 1, **more: Any) -> bytes:
    """An event of a stream; `more` replaces fields of it."""
    whole = {"choices": [{"text": "w "}], "usage": {"completion_tokens": tokens}, **more}
    return b"data: " + json.dumps(whole).encode() + b"\n\n"


def chunk(content: bytes, length: int | None = None) -> bytes:
    return b"%x\r\n%s\r\n" % (len(content) if length is None else length, content)


class Faulty(Handler):
    """Faults by path, kept on the class that `misbehaving` makes."""

    faults: dict[str, Fault] = {}
    over: threading.Event
    lock: threading.Lock

    def do_GET(self) -> None:
        if not self.misbehave():
            super().do_GET()

    def do_POST(self) -> None:
        if not self.misbehave():
            super().do_POST()

    def misbehave(self) -> bool:
        fault = self.faults.get(self.path)
        pieces = None if fault is None else fault(self.server.state)  # type: ignore[attr-defined]
        if pieces is None:
            return False
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.close_connection, end = True, time.monotonic() + END
        self.connection.settimeout(END)
        try:
            for piece in pieces:
                if self.over.is_set() or time.monotonic() > end:
                    break
                if isinstance(piece, bytes):
                    self.connection.sendall(piece)
                else:
                    self.over.wait(min(piece, max(end - time.monotonic(), 0.0)))
        except OSError:  # the client has left
            pass
        return True


@contextmanager
def misbehaving(faults: dict[str, Fault], **settings: Any) -> Iterator[tuple[str, State]]:
    """(address, state) of a running fake with `faults` by path."""
    over = threading.Event()
    handler = type("Misbehaving", (Faulty,), {"faults": faults, "over": over})
    with serving(handler, **settings) as running:
        try:
            yield running
        finally:
            over.set()
