"""A small HTTP server that speaks like vLLM or SGLang: OpenAI-compatible streams, and each engine's own metrics."""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

DEPTH = 3


@dataclass
class State:
    """What the server does and has counted.

    Attributes:
        scripts: accepted drafts of every forward of the n-th request (cycled).
        delay: seconds between the end of a stream and its entry in the counters.
        merge: send all tokens in one message, as a slow client sees them.
        silent: send tokens without text, as a parser of thoughts or tool calls leaves them.
        histogram, verify_count, counter: what an SGLang of some version reports.
        strangers: requests of somebody else that are counted beside each of ours.
        info, details: what replaces parts of an SGLang's server info, and of what it says about each answer.
    """

    engine: str = "vllm"
    scripts: list[list[int]] = field(default_factory=lambda: [[1, 3, 0], [2, 2, 3]])
    delay: float = 0.0
    merge: bool = False
    silent: bool = False
    speculative: bool = True
    metrics: bool = True
    histogram: bool = True
    verify_count: bool = True
    counter: bool = True
    mean_length: float | None = None
    strangers: int = 0
    models: tuple[str, ...] = ("tiny",)
    key: str | None = None
    info: dict[str, Any] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    finished: int = 0
    drafts: int = 0
    accepted: int = 0
    reached: list[int] = field(default_factory=lambda: [0] * DEPTH)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, accepted: list[int]) -> None:
        with self.lock:
            self.finished += 1 + self.strangers
            self.drafts += len(accepted)
            self.accepted += sum(accepted)
            for depth in range(DEPTH):
                self.reached[depth] += sum(a > depth for a in accepted)

    def metrics_text(self) -> str:
        label = f'engine="0",model_name="{self.models[0]}"'
        if self.engine == "vllm":
            lines = ["# TYPE vllm:request_success_total counter"]
            for reason, count in (("stop", 0), ("length", self.finished)):
                lines.append(f'vllm:request_success_total{{{label},finished_reason="{reason}"}} {count}.0')
            if self.speculative:
                lines += [
                    f"vllm:spec_decode_num_drafts_total{{{label}}} {self.drafts}.0",
                    f"vllm:spec_decode_num_drafts_created{{{label}}} 1.7e+09",
                    f"vllm:spec_decode_num_draft_tokens_total{{{label}}} {DEPTH * self.drafts}.0",
                    f"vllm:spec_decode_num_accepted_tokens_total{{{label}}} {self.accepted}.0",
                    'vllm:spec_decode_num_drafts_total{engine="0",model_name="another"} 999.0',
                ]
                for depth, count in enumerate(self.reached):
                    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
                    lines.append(f'{name}{{{label},position="{depth}"}} {count}.0')
            return "\n".join(lines) + "\n"
        lines = [f"sglang:num_requests_total{{{label}}} {self.finished}.0"]
        if self.counter:
            lines.append(f"sglang:spec_verify_calls_total{{{label}}} {self.drafts}.0")
        lines.append(f"sglang:spec_accept_length{{{label}}} 2.5")
        return "\n".join(lines) + "\n"

    def server_info(self) -> dict[str, Any]:
        return {
            "version": "0.5.23",
            "speculative_algorithm": "EAGLE3" if self.speculative else None,
            "speculative_num_steps": DEPTH,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": DEPTH + 1,
            "internal_states": [{"avg_spec_accept_length": self.mean_length}],
            **self.info,
        }


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, status: int, content: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def reply(self, value: Any, status: int = 200) -> None:
        self.answer(status, json.dumps(value).encode())

    def do_GET(self) -> None:
        state: State = self.server.state  # type: ignore[attr-defined]
        if state.key and self.headers.get("Authorization") != f"Bearer {state.key}":
            return self.reply({"error": "who are you"}, 401)
        if self.path == "/v1/models":
            return self.reply({"data": [{"id": name, "root": f"/models/{name}"} for name in state.models]})
        if self.path == "/metrics" and state.metrics:
            return self.answer(200, state.metrics_text().encode(), "text/plain")
        if self.path == "/version" and state.engine == "vllm":
            return self.reply({"version": "0.32.0"})
        if self.path == "/server_info" and state.engine == "sglang":  # newer versions dropped the prefix get_
            return self.reply(state.server_info())
        return self.reply({"error": "not found"}, 404)

    def do_POST(self) -> None:
        state: State = self.server.state  # type: ignore[attr-defined]
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with state.lock:
            number = len(state.requests)
            state.requests.append((self.path, body))
        accepted, left, steps = [], body["max_tokens"] - 1, [1]
        for drafts in state.scripts[number % len(state.scripts)]:
            if left < 1:
                break
            accepted.append(drafts)
            steps.append(min(drafts + 1, left))
            left -= steps[-1]
        if state.merge:
            steps = [sum(steps)]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        chat, total = self.path.endswith("/chat/completions"), 0
        for step in steps:
            total += step
            text = "" if state.silent else "w " * step
            choice: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
            self.event({"choices": [choice], "usage": {"completion_tokens": total}})
        if state.engine == "sglang" and body.get("return_spec_tokens_details"):
            details: dict[str, Any] = {}
            if state.verify_count:
                details["spec_verify_ct"] = len(accepted)
            if state.histogram:
                details["spec_correct_drafts_histogram"] = [accepted.count(d) for d in range(max(accepted) + 1)]
            details |= state.details
            if details:
                self.event({"choices": [], "sglext": {"spec_tokens_details": details}})
        self.event({"choices": [], "usage": {"completion_tokens": total}})
        self.wfile.write(b"data: [DONE]\n\n")
        self.wfile.flush()
        threading.Thread(target=self.book, args=(state, accepted), daemon=True).start()

    def event(self, value: Any) -> None:
        self.wfile.write(f"data: {json.dumps(value)}\n\n".encode())
        self.wfile.flush()

    @staticmethod
    def book(state: State, accepted: list[int]) -> None:
        time.sleep(state.delay)
        state.count(accepted)


@contextmanager
def serving(
    handler: type[Handler] = Handler, tls: ssl.SSLContext | None = None, **settings: Any
) -> Iterator[tuple[str, State]]:
    """(address, state) of a running fake."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    server.state = State(**settings)  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        scheme = "http" if tls is None else "https"
        yield f"{scheme}://127.0.0.1:{server.server_address[1]}", server.state  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        server.server_close()
