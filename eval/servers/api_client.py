"""HTTP to an OpenAI-compatible server: which models it serves, its pages, and streamed answers.

Every request has a deadline, and every answer a limit in bytes. Redirects are not followed, so that the API key goes
only to the given address. Every failure of the server is a ServerError.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

try:
    import httpx2
except ImportError:  # huggingface_hub before 2 brings the older one, whose interface is the same
    import httpx as httpx2  # type: ignore[no-redef]

from headstart.eval.servers.answers import Lines, Served, parsed
from headstart.eval.servers.checks import found, one_line
from headstart.heads.errors import ConfigError, ServerError

#: most seconds for a page, and for the text of an error
TIMEOUT, ERROR_TIMEOUT = 10.0, 2.0
#: most seconds until an answer's next token; a whole answer of n tokens may take PATIENCE + n · PER_TOKEN
PATIENCE, PER_TOKEN = 600.0, 2.0
#: most bytes of a page; a stream of n tokens may have STREAM + n · TOKEN_BYTES
PAGE, TOKEN_BYTES, STREAM = 32 << 20, 64 << 10, 4 << 20

T = TypeVar("T")


class StatusError(ServerError):
    """The server answered with a status other than 200."""


class Client:
    """HTTP to one server.

    Args:
        url: base address, with or without `/v1`.
        key: API key, sent as a bearer token to this address only.
    Raises: ConfigError for a malformed address or key, and for a proxy of the environment that cannot be used.
    """

    def __init__(self, url: str, key: str | None = None):
        self.url, host = _address(url.strip())
        self.headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if key:
            if not (key.isascii() and key.isprintable() and " " not in key):
                raise ConfigError("OPENAI_API_KEY: holds characters that no HTTP header can carry; set it again")
            self.headers["Authorization"] = f"Bearer {key}"
        try:
            self._settings: dict[str, Any] = {
                "headers": self.headers,
                # made once: to read the certificates takes longer than a request
                "verify": httpx2.create_ssl_context() if self.url.startswith("https:") else False,
                # this machine is never reached through a proxy
                "trust_env": not _is_this_machine(host),
                "timeout": httpx2.Timeout(None, connect=TIMEOUT),
                "limits": httpx2.Limits(max_connections=None, max_keepalive_connections=0),
                "follow_redirects": False,
            }
            self._web()
        except (ImportError, OSError, ValueError, httpx2.InvalidURL) as error:
            raise ConfigError(
                f"the environment's proxy or certificates cannot be used for {self.url} ({one_line(str(error))}): mend "
                f"HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and SSL_CERT_FILE, or set NO_PROXY={host}"
            ) from error

    def _web(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(**self._settings)

    def text(self, path: str) -> str:
        """A page. Raises: ServerError with address, cause and remedy; StatusError where it does not exist."""
        try:
            return self._page(path).decode()
        except UnicodeDecodeError as error:
            raise ServerError(f"{self.url}{path}: the page is not UTF-8 text ({_cause(error)})") from error

    def json(self, path: str) -> Any:
        """A page of JSON. Raises: as `text`, and ServerError for other content."""
        return parsed(self._page(path), self.url + path)

    def maybe_json(self, *paths: str) -> dict[str, Any]:
        """The JSON object at the first of `paths` that exists, or {}. Raises: as `json` where that page is broken."""
        for path in paths:
            try:
                value = self.json(path)
            except StatusError:
                continue
            if not isinstance(value, dict):
                raise ServerError(f"{self.url}{path}: found {found(value)}, expected an object")
            return value
        return {}

    def generate(self, requests: Sequence[tuple[str, dict[str, Any]]]) -> list[Served]:
        """Stream the answers to `requests`, (path, body) each, all sent at once.

        Raises: ServerError of the first that is refused, breaks off, takes too long or is not complete; the others are
            cancelled.
        """

        async def all_of_them() -> list[Served]:
            async with self._web() as web:
                try:
                    async with asyncio.TaskGroup() as group:
                        tasks = [group.create_task(self._stream(web, path, body)) for path, body in requests]
                except ExceptionGroup as errors:
                    raise errors.exceptions[0] from None
            return [task.result() for task in tasks]

        return _run(all_of_them())

    def _page(self, path: str) -> bytes:
        async def page() -> bytes:
            content = bytearray()
            late = lambda: f"no whole answer within {TIMEOUT:g} s"  # noqa: E731
            async with self._web() as web, self._answer(web, path, None, TIMEOUT, late) as (response, _):
                async for chunk in response.aiter_raw():
                    content += chunk
                    if len(content) > PAGE:
                        raise ServerError(f"{self.url}{path}: the answer is longer than {PAGE} bytes")
            return bytes(content)

        return _run(page())

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

        async with self._answer(web, path, asked, PATIENCE, late) as (response, deadline):
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

    @asynccontextmanager
    async def _answer(
        self, web: httpx2.AsyncClient, path: str, body: dict[str, Any] | None, seconds: float, late: Callable[[], str]
    ) -> AsyncIterator[tuple[httpx2.Response, asyncio.Timeout]]:
        """A response of status 200, and its deadline, which the caller may move.

        Args: seconds: until the deadline. late: says what had arrived by then.
        Raises: ServerError for every failure, also for one inside the `async with` block.
        """
        where, begun = self.url + path, False
        method, content = ("GET", None) if body is None else ("POST", json.dumps(body).encode())
        try:
            async with asyncio.timeout(seconds) as deadline, web.stream(method, where, content=content) as response:
                begun = True
                await _accept(response, where)
                yield response, deadline
        except TimeoutError as error:
            raise ServerError(f"{where}: {late()}; see the server's log, and whether it is overloaded") from error
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.ProxyError) as error:
            raise ServerError(f"{self.url}: {_unreached(_cause(error))}") from error
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError) as error:
            happened = "the answer broke off" if begun else "no answer in HTTP"
            raise ServerError(
                f"{where}: {happened} ({_cause(error)}). Check that --url is the server's own address, and see its log."
            ) from error


async def _accept(response: httpx2.Response, where: str) -> None:
    """Raises ServerError, with the remedy, for all but an uncompressed answer of status 200."""
    status = response.status_code
    if status == 200:
        coding = response.headers.get("content-encoding", "identity")
        if coding.lower() != "identity":
            raise ServerError(
                f"{where}: the answer comes as {one_line(coding, 40)}, which was not asked for; is a proxy in between?"
            )
        return
    if status in (401, 403):
        raise StatusError(f"{where}: the server wants an API key (HTTP {status}); set OPENAI_API_KEY")
    if 300 <= status < 400:
        location = _without_userinfo(response.headers.get("location", "nowhere"))
        raise StatusError(
            f"{where}: HTTP {status} points to {one_line(location, 200)}; redirects are not followed: give --url the "
            "server's own address"
        )
    said = b""
    with suppress(httpx2.HTTPError, TimeoutError):
        async with asyncio.timeout(ERROR_TIMEOUT):
            async for chunk in response.aiter_raw():
                said += chunk
                if len(said) > 2000:
                    break
    raise StatusError(f"{where}: HTTP {status}: {one_line(said[:2000].decode(errors='replace'), 500)}")


def _run(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. In a notebook, whose thread runs an event loop already, it runs in a thread of its own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


def _address(url: str) -> tuple[str, str]:
    """(base address without `/v1`, host). Raises: ConfigError whose text shows no user name and no password."""
    expected = "expected an address such as http://localhost:8000"
    named = one_line(re.split("[?#]", _without_userinfo(url))[0], 200)
    try:
        read = httpx2.URL(url)
    except (httpx2.InvalidURL, ValueError):  # its message may hold part of a password
        raise ConfigError(f"--url: found {named!r}, {expected}") from None
    if read.scheme not in ("http", "https") or not read.host or not (read.port is None or 0 < read.port < 1 << 16):
        raise ConfigError(f"--url: found {named!r}, {expected}")
    if read.userinfo or read.query or read.fragment:
        raise ConfigError(
            f"--url: found more than an address (a user name, a password, a query or a fragment) around {named!r}; "
            f"{expected}, and set OPENAI_API_KEY where the server wants a key"
        )
    base = str(read).rstrip("/").removesuffix("/v1").rstrip("/")
    return base, read.host


def _without_userinfo(url: str) -> str:
    """`url` without user name and password.

    >>> _without_userinfo("http://me:secret@host:1/v1")
    'http://host:1/v1'
    """
    start, slashes, rest = url.partition("//")
    if not slashes:
        return url.rpartition("@")[2]
    authority, slash, path = rest.partition("/")
    # a slash in the password looks like the end of the authority
    return f"{start}//{(authority + slash + path).rpartition('@')[2]}" if "@" in rest else url


def _is_this_machine(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    with suppress(ValueError):
        address = ipaddress.ip_address(host)
        return address.is_loopback or address.is_unspecified
    return False


def _unreached(cause: str) -> str:
    """The error's text where no connection was made."""
    if "CERTIFICATE_VERIFY_FAILED" in cause:
        return (
            f"its certificate is not trusted here ({cause}). Give --url the name that the certificate is for; where an "
            "authority of your own signed it, set SSL_CERT_FILE to that authority's certificate"
        )
    if "SSL" in cause:
        return f"no TLS is spoken there ({cause}). Give --url an address with http: where the server has no certificate"
    return f"no server answers there ({cause}). Check --url, and that the server has finished loading."


def _cause(error: BaseException) -> str:
    return one_line(str(error), 200) or type(error).__name__


def served_model(client: Client, wanted: str | None) -> str:
    """The model to ask for: `wanted`, or the only one served. Raises: ServerError listing what is served."""
    where = f"{client.url}/v1/models"
    listed = client.json("/v1/models")
    data = listed.get("data") if isinstance(listed, dict) else None
    if not isinstance(data, list) or not data:
        raise ServerError(f"{where}: lists no model; expected an OpenAI-compatible server")
    for entry in data:
        name = entry.get("id") if isinstance(entry, dict) else entry
        if not (isinstance(entry, dict) and isinstance(name, str) and name.isprintable() and 0 < len(name) <= 1000):
            raise ServerError(f"{where}: found {found(name)} as the id of a model, expected its name")
    names = one_line(", ".join(entry["id"] for entry in data[:20]) + (", …" if len(data) > 20 else ""), 500)
    if wanted is None:
        # adapters are listed behind the model that they belong to
        bases = [entry["id"] for entry in data if not entry.get("parent")]
        if len(bases) != 1:
            raise ServerError(f"{client.url}: serves {names}; name one with --model")
        return bases[0]
    for entry in data:
        if wanted in (entry["id"], entry.get("root")):
            return entry["id"]
    raise ServerError(f"{client.url}: does not serve {wanted!r}; it serves {names}")
