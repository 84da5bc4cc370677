"""HTTP to an OpenAI-compatible server: which models it serves, and streamed answers with their token counts."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from headstart.heads.errors import ConfigError, ServerError

#: seconds to wait for a small answer, and between two bytes of a generated one
TIMEOUT, PATIENCE = 10.0, 600.0


@dataclass
class Served:
    """One answer of a server.

    Attributes:
        text: what was generated.
        tokens: number of tokens generated, the stop token included.
        steps: tokens of every message of the stream, where the server said them.
        details: what the server adds about its speculation (SGLang).
        sent, first, last: clock readings in seconds.
    """

    text: str = ""
    tokens: int = 0
    steps: list[int] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    sent: float = 0.0
    first: float = 0.0
    last: float = 0.0

    @property
    def committed(self) -> int:
        """Tokens after the one that prefill gives."""
        return max(self.tokens - 1, 0)

    @property
    def seen(self) -> bool:
        """Whether the stream's messages account for every token, the first one alone."""
        return bool(self.steps) and self.steps[0] == 1 and sum(self.steps) == self.tokens


class Client:
    """HTTP to one server.

    Args:
        url: base address, with or without `/v1`.
        key: API key, sent as a bearer token.
    """

    def __init__(self, url: str, key: str | None = None):
        self.url = url.rstrip("/").removesuffix("/v1")
        self.headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"--url: found {url!r}, expected an address such as http://localhost:8000")

    def open(self, path: str, body: dict[str, Any] | None = None, timeout: float = TIMEOUT) -> Any:
        """The response object. Raises ServerError naming address, cause and remedy."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, self.headers)
        try:
            return urllib.request.urlopen(request, timeout=timeout)
        except urllib.error.HTTPError as error:
            said = error.read(2000).decode(errors="replace").strip()
            if error.code in (401, 403):
                raise ServerError(
                    f"{self.url}{path}: the server wants an API key (HTTP {error.code}); set OPENAI_API_KEY"
                ) from error
            raise ServerError(f"{self.url}{path}: HTTP {error.code}: {said[:500]}") from error
        except (OSError, ValueError) as error:
            cause = getattr(error, "reason", error)
            raise ServerError(
                f"{self.url}: no server answers there ({cause}). Check --url, and that the server has finished loading."
            ) from error

    def text(self, path: str) -> str:
        with self.open(path) as response:
            return response.read().decode(errors="replace")

    def json(self, path: str) -> Any:
        try:
            return json.loads(self.text(path))
        except ValueError as error:
            raise ServerError(f"{self.url}{path}: the answer is not JSON; is this an OpenAI-compatible server?") from (
                error
            )

    def maybe_json(self, *paths: str) -> dict[str, Any]:
        """The first of `paths` that answers with an object, else {}."""
        for path in paths:
            try:
                found = self.json(path)
            except ServerError:
                continue
            if isinstance(found, dict):
                return found
        return {}

    def generate(self, path: str, body: dict[str, Any]) -> Served:
        """Stream one answer."""
        answer = Served(sent=time.perf_counter())
        options = {"include_usage": True, "continuous_usage_stats": True}
        with self.open(path, {**body, "stream": True, "stream_options": options}, PATIENCE) as response:
            for event in _events(response, self.url + path):
                _add(answer, event)
        if not answer.tokens:
            raise ServerError(
                f"{self.url}{path}: the server did not say how many tokens it generated (stream_options.include_usage)"
            )
        return answer


def _events(lines: Any, where: str) -> Iterator[dict[str, Any]]:
    """JSON objects of a server-sent event stream."""
    try:
        for raw in lines:
            line = raw.decode(errors="replace").strip()
            if not line.startswith("data:"):
                continue
            content = line[5:].strip()
            if content == "[DONE]":
                return
            event = json.loads(content)
            if "error" in event:
                raise ServerError(f"{where}: {json.dumps(event['error'])[:500]}")
            yield event
    except (OSError, ValueError) as error:
        raise ServerError(f"{where}: the answer broke off ({type(error).__name__}: {error})") from error


def _add(answer: Served, event: dict[str, Any]) -> None:
    now = time.perf_counter()
    usage = event.get("usage") or {}
    total = usage.get("completion_tokens", answer.tokens)
    if total > answer.tokens:
        answer.steps.append(total - answer.tokens)
        answer.tokens, answer.last = total, now
        answer.first = answer.first or now
    extension = event.get("sglext") or {}
    found = extension.get("spec_tokens_details")
    for choice in event.get("choices") or []:
        delta = choice.get("delta") or {}
        answer.text += choice.get("text") or delta.get("content") or ""
        found = choice.get("meta_info") or found
        answer.first = answer.first or now
    if isinstance(found, dict):
        answer.details |= {name: value for name, value in found.items() if name.startswith("spec_")}


def served_model(client: Client, wanted: str | None) -> str:
    """The model to ask for: `wanted`, or the only one served. Raises: ServerError listing what is served."""
    listed = client.json("/v1/models")
    data = listed.get("data") if isinstance(listed, dict) else None
    if not isinstance(data, list) or not data:
        raise ServerError(f"{client.url}/v1/models: lists no model; expected an OpenAI-compatible server")
    names = [str(entry.get("id")) for entry in data]
    if wanted is None:
        # adapters are listed behind the model that they belong to
        bases = [str(entry.get("id")) for entry in data if not entry.get("parent")]
        if len(bases) != 1:
            raise ServerError(f"{client.url}: serves {', '.join(names)}; name one with --model")
        return bases[0]
    for entry in data:
        if wanted in (entry.get("id"), entry.get("root")):
            return str(entry.get("id"))
    raise ServerError(f"{client.url}: does not serve {wanted!r}; it serves {', '.join(names)}")
