"""A real HTTP server of OpenAI's chat interface that renders prompts itself and misbehaves by a script.

Its answers are fixed: `answer_to` says them. Each entry of `faults` is the list of what happens to the requests of one
question, one after another; then it is answered.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

#: seconds after which a stall ends by itself
END = 20.0


def answer_to(question: str) -> str:
    """What every server answers: the digits of the question backwards, after a greeting.

    >>> answer_to("Question-1-2")
    'Hello there-2-1.'
    """
    return "Hello there" + "".join("-" + letter for letter in reversed(question) if letter.isdigit()) + "."


def _with_objects(message: dict[str, Any]) -> dict[str, Any]:
    """A message of a request as servers give it to the template: `arguments` are JSON text on the wire only."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else message


@dataclass
class State:
    """What a server is like, and what it was asked.

    Attributes:
        ids: whether it returns token ids, as vLLM does.
        faults: question → what happens to its requests in turn.
        always: what happens to every request, whatever its question.
        change: changes the body of every answer.
        answer: messages → the answer's message, instead of `answer_to`.
        models: what /v1/models lists, instead of `model`.
        refuses: what every request gets with status 400.
        asked: (question, body) of every request, but those with one token of answer.
        tests: requests with one token of answer.
        most_in_flight: at once.
    """

    tokenizer: Any
    stop: int
    model: str = "tiny"
    owner: str = "vllm"
    ids: bool = True
    key: str | None = None
    latency: float = 0.0
    faults: dict[str, list[tuple[Any, ...]]] = field(default_factory=dict)
    always: Callable[[int], tuple[Any, ...] | None] = lambda number: None
    change: Callable[[dict[str, Any]], Any] = lambda body: body
    answer: Callable[[list[dict[str, Any]]], dict[str, Any]] | None = None
    models: list[dict[str, Any]] | None = None
    refuses: dict[str, Any] | None = None
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    tests: int = 0
    in_flight: int = 0
    most_in_flight: int = 0
    times: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    over: threading.Event = field(default_factory=threading.Event)

    def counts(self) -> Counter[str]:
        return Counter(question for question, _ in self.asked)

    def render(self, body: dict[str, Any]) -> list[int]:
        if "messages" not in body:
            return list(body["prompt"])
        messages = [_with_objects(message) for message in body["messages"]]
        return self.tokenizer.apply_chat_template(
            messages, tools=body.get("tools"), add_generation_prompt=True, return_dict=False,
            **body.get("chat_template_kwargs", {}),
        )  # fmt: skip

    def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        """The whole answer, cut at max_tokens."""
        prompt = self.render(body)
        chat = "messages" in body
        question = body["messages"][-1]["content"] if chat else " ".join(map(str, prompt))
        message = self.answer(body["messages"]) if self.answer else {"content": answer_to(question)}
        finish = message.pop("finish_reason", "stop")
        text = message.get("content") or ""
        whole = self.tokenizer(text, add_special_tokens=False)["input_ids"] + [self.stop]
        ids = whole[: body["max_tokens"]]
        if len(ids) < len(whole) and finish == "stop":
            finish, message["content"] = "length", self.tokenizer.decode(ids)
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
        if chat:
            choice["message"] = {"role": "assistant", "content": None, **message}
        else:
            choice["text"] = message["content"]
        made: dict[str, Any] = {
            "id": "x", "object": "chat.completion", "model": self.model, "choices": [choice],
            "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(ids)},
        }  # fmt: skip
        if self.ids and body.get("return_token_ids"):
            choice["token_ids"], made["prompt_token_ids"] = ids, prompt
        if body.get("logprobs") and chat:
            # the token itself has −0.5, the next ids of the vocabulary −1.5, −2.5, …
            choice["logprobs"] = {
                "content": [
                    {"token": f"token_id:{token}", "logprob": -0.5, "top_logprobs": [
                        {"token": f"token_id:{token + more}", "logprob": -0.5 - more}
                        for more in range(body["top_logprobs"])]}
                    for token in ids
                ]
            }  # fmt: skip
        return self.change(made)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def setup(self) -> None:
        super().setup()
        self.state: State = self.server.state  # type: ignore[attr-defined]
        with self.state.lock:
            self.server.sockets.add(self.request)  # type: ignore[attr-defined]

    def finish(self) -> None:
        with self.state.lock:
            self.server.sockets.discard(self.request)  # type: ignore[attr-defined]
        super().finish()

    def send(self, value: Any, status: int = 200, **headers: str) -> None:
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, said in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), said)
        self.end_headers()
        self.wfile.write(content)

    def allowed(self) -> bool:
        state = self.state
        if state.key is not None and self.headers.get("Authorization") != f"Bearer {state.key}":
            self.send({"error": {"message": f"wrong key {self.headers.get('Authorization')}"}}, 401)
            return False
        return True

    def do_GET(self) -> None:
        if not self.allowed():
            return
        state = self.state
        if self.path == "/v1/models":
            entry = {"id": state.model, "object": "model", "owned_by": state.owner, "root": state.model}
            self.send({"object": "list", "data": state.models if state.models is not None else [entry]})
        else:
            self.send({"error": "no such page"}, 404)

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if not content:  # the client was killed
            self.close_connection = True
            return
        body = json.loads(content)
        if not self.allowed():
            return
        state = self.state
        if self.path == "/tokenize" and state.owner == "vllm":
            tokens = state.render(body)
            self.send({"count": len(tokens), "tokens": tokens})
            return
        if state.refuses is not None:
            self.send(state.refuses, 400)
            return
        question = body["messages"][-1]["content"] if "messages" in body else "ids"
        fault = None
        with state.lock:
            state.paths.append(self.path)
            if body["max_tokens"] == 1:
                state.tests += 1
            else:
                state.asked.append((question, body))
                state.times.append(time.monotonic())
                script = state.faults.get(question)
                fault = state.always(len(state.asked)) or (script.pop(0) if script else None)
            state.in_flight += 1
            state.most_in_flight = max(state.most_in_flight, state.in_flight)
        try:
            state.over.wait(state.latency)
            self.answer(fault, body)
        except OSError:  # the client has left
            self.close_connection = True
        finally:
            with state.lock:
                state.in_flight -= 1

    def answer(self, fault: tuple[Any, ...] | None, body: dict[str, Any]) -> None:
        kind, *more = fault or ("none",)
        whole = json.dumps(self.state.reply(body)).encode()
        if kind == "none":
            self.send(whole)
        elif kind == "status":
            self.send({"error": {"message": "as the script says"}}, more[0], **(more[1] if len(more) > 1 else {}))
        elif kind == "body":  # any other body with status 200
            self.send(more[0])
        elif kind == "stall":
            self.state.over.wait(min(more[0], END))
            self.send(whole)
        elif kind == "cut":  # the body ends in its middle
            self.send_response(200)
            self.send_header("Content-Length", str(len(whole)))
            self.end_headers()
            self.wfile.write(whole[: len(whole) // 2])
            self.close_connection = True
        elif kind == "cut stream":  # chunks without the last one
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(whole) // 2, whole[: len(whole) // 2]))
            self.close_connection = True
        elif kind == "die":
            threading.Thread(target=self.server.die, daemon=True).start()  # type: ignore[attr-defined]
            self.state.over.wait(END)
            self.close_connection = True
        elif kind == "change":
            self.send(more[0](json.loads(whole)))
        else:
            raise AssertionError(kind)


class Serving(ThreadingHTTPServer):
    """Attributes: url: the address that a recipe names."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, state: State, port: int = 0):
        super().__init__(("127.0.0.1", port), Handler)
        self.state, self.sockets = state, set()
        self.dead = False
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def handle_error(self, *request: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # the client has left
            super().handle_error(*request)

    def die(self) -> None:
        """Refuse connections from now on, and break off those that are open."""
        import socket

        self.dead = True
        self.shutdown()
        self.server_close()
        self.state.over.set()
        with self.state.lock:
            for open_socket in self.sockets:
                try:
                    open_socket.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass


@contextmanager
def serving(*states: State) -> Iterator[list[Serving]]:
    """Running servers, one for each state."""
    servers = [Serving(state) for state in states]
    try:
        yield servers
    finally:
        for server in servers:
            if not server.dead:
                server.die()
