"""HTTP to an OpenAI-compatible server: which models it serves, its pages, and requests with a deadline.

Every request has a deadline, and every answer a limit in bytes. Redirects are not followed, so that the API key goes
only to the given address. Every failure of the server is a ServerError, and none shows the key.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

try:
    import httpx2
except ImportError:  # huggingface_hub before 2 brings the older one, whose interface is the same
    import httpx as httpx2  # type: ignore[no-redef]

from headstart.data.serving.checks import found, one_line, parsed
from headstart.heads.errors import ConfigError, ServerError

#: most seconds for a page, and for the text of an error
TIMEOUT, ERROR_TIMEOUT = 10.0, 2.0
#: most bytes of a page
PAGE = 32 << 20

T = TypeVar("T")


@dataclass(frozen=True)
class Named:
    """What messages call the settings of a server: where its address, its model and its API key are given."""

    url: str = "--url"
    model: str = "--model"
    key: str = "OPENAI_API_KEY"


class StatusError(ServerError):
    """The server answered with a status other than 200.

    Attributes:
        status: HTTP status.
        retry_after: seconds after which it wants to be asked again, where it says so.
    """

    def __init__(self, message: str, status: int, retry_after: float | None = None):
        super().__init__(message)
        self.status, self.retry_after = status, retry_after


class UnreachedError(ServerError):
    """No connection was made."""


class LateError(ServerError):
    """The answer was not whole at its deadline."""


class Connection:
    """HTTP to one server.

    Args:
        url: base address, with or without `/v1`.
        key: API key, sent as a bearer token to this address only.
        named: what messages call these settings.
    Raises: ConfigError for a malformed address or key, and for a proxy of the environment that cannot be used.
    """

    def __init__(self, url: str, key: str | None = None, named: Named | None = None):
        self.named, self._key = named or Named(), key
        self.url, host = _address(url.strip(), self.named)
        self.headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if key:
            if not (key.isascii() and key.isprintable() and " " not in key):
                raise ConfigError(f"{self.named.key}: holds characters that no HTTP header can carry; set it again")
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
            self.web()
        except (ImportError, OSError, ValueError, httpx2.InvalidURL) as error:
            raise ConfigError(
                f"the environment's proxy or certificates cannot be used for {self.url} ({one_line(str(error))}): mend "
                f"HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and SSL_CERT_FILE, or set NO_PROXY={host}"
            ) from error

    def web(self) -> httpx2.AsyncClient:
        """A client with this server's settings, for one event loop."""
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

    def post(self, path: str, body: dict[str, Any], seconds: float) -> bytes:
        """The answer to a body of JSON. Raises: ServerError as `answer` does."""
        return self._whole(path, body, seconds)

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

    def _page(self, path: str) -> bytes:
        return self._whole(path, None, TIMEOUT)

    def _whole(self, path: str, body: dict[str, Any] | None, seconds: float) -> bytes:
        async def page() -> bytes:
            content = bytearray()
            late = lambda: f"no whole answer within {seconds:g} s"  # noqa: E731
            async with self.web() as web, self.answer(web, path, body, seconds, late) as (response, _):
                async for chunk in response.aiter_raw():
                    content += chunk
                    if len(content) > PAGE:
                        raise ServerError(f"{self.url}{path}: the answer is longer than {PAGE} bytes")
            return bytes(content)

        return run_here(page())

    @asynccontextmanager
    async def answer(
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
                await self._accept(response, where)
                yield response, deadline
        except TimeoutError as error:
            raise LateError(f"{where}: {late()}; see the server's log, and whether it is overloaded") from error
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.ProxyError) as error:
            raise UnreachedError(f"{self.url}: {_unreached(_cause(error), self.named.url)}") from error
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError) as error:
            happened = "the answer broke off" if begun else "no answer in HTTP"
            raise ServerError(
                f"{where}: {happened} ({_cause(error)}). Check that {self.named.url} is the server's own "
                "address, and see its log."
            ) from error

    async def _accept(self, response: httpx2.Response, where: str) -> None:
        """Raises ServerError, with the remedy, for all but an uncompressed answer of status 200."""
        status = response.status_code
        if status == 200:
            coding = response.headers.get("content-encoding", "identity")
            if coding.lower() != "identity":
                raise ServerError(
                    f"{where}: the answer comes as {one_line(coding, 40)}, which was not asked for; is a proxy in "
                    "between?"
                )
            return
        if status in (401, 403):
            raise StatusError(f"{where}: the server wants an API key (HTTP {status}); set {self.named.key}", status)
        if 300 <= status < 400:
            location = _without_userinfo(response.headers.get("location", "nowhere"))
            raise StatusError(
                f"{where}: HTTP {status} points to {one_line(location, 200)}; redirects are not followed: give "
                f"{self.named.url} the server's own address",
                status,
            )
        said = b""
        with suppress(httpx2.HTTPError, TimeoutError):
            async with asyncio.timeout(ERROR_TIMEOUT):
                async for chunk in response.aiter_raw():
                    said += chunk
                    if len(said) > 2000:
                        break
        text = said[:2000].decode(errors="replace")
        if self._key:  # some servers repeat a key that they refuse
            text = text.replace(self._key, "…")
        wait = retry_after(response.headers.get("retry-after"))
        raise StatusError(f"{where}: HTTP {status}: {one_line(text, 500)}", status, wait)


def retry_after(header: str | None, now: float | None = None) -> float | None:
    """Seconds to wait that a Retry-After header asks for, as a number or as a date; None where it says nothing.

    >>> retry_after("7"), retry_after("Thu, 01 Jan 1970 00:00:30 GMT", now=10.0), retry_after("soon")
    (7.0, 20.0, None)
    """
    if header is None:
        return None
    if header.strip().isdecimal():
        return min(float(header), 86400.0)
    try:
        until = parsedate_to_datetime(header).timestamp()
    except (ValueError, TypeError, OverflowError):
        return None
    return min(max(until - (time.time() if now is None else now), 0.0), 86400.0)


def run_here(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. In a notebook, whose thread runs an event loop already, it runs in a thread of its own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


def _address(url: str, named: Named) -> tuple[str, str]:
    """(base address without `/v1`, host). Raises: ConfigError whose text shows no user name and no password."""
    expected = "expected an address such as http://localhost:8000"
    shown = one_line(re.split("[?#]", _without_userinfo(url))[0], 200)
    try:
        read = httpx2.URL(url)
    except (httpx2.InvalidURL, ValueError):  # its message may hold part of a password
        raise ConfigError(f"{named.url}: found {shown!r}, {expected}") from None
    if read.scheme not in ("http", "https") or not read.host or not (read.port is None or 0 < read.port < 1 << 16):
        raise ConfigError(f"{named.url}: found {shown!r}, {expected}")
    if read.userinfo or read.query or read.fragment:
        raise ConfigError(
            f"{named.url}: found more than an address (a user name, a password, a query or a fragment) around "
            f"{shown!r}; {expected}, and set {named.key} where the server wants a key"
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


def _unreached(cause: str, url: str) -> str:
    """The error's text where no connection was made."""
    if "CERTIFICATE_VERIFY_FAILED" in cause:
        return (
            f"its certificate is not trusted here ({cause}). Give {url} the name that the certificate is for; where an "
            "authority of your own signed it, set SSL_CERT_FILE to that authority's certificate"
        )
    if "SSL" in cause:
        return f"no TLS is spoken there ({cause}). Give {url} an address with http: where the server has no certificate"
    return f"no server answers there ({cause}). Check {url}, and that the server has finished loading."


def _cause(error: BaseException) -> str:
    return one_line(str(error), 200) or type(error).__name__


def served_model(client: Connection, wanted: str | None) -> str:
    """The name of `model_entry`."""
    return model_entry(client, wanted)["id"]


def model_entry(client: Connection, wanted: str | None) -> dict[str, Any]:
    """What /v1/models says of the model to ask for: `wanted`, or the only one served.

    Raises: ServerError listing what is served.
    """
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
        bases = [entry for entry in data if not entry.get("parent")]
        if len(bases) != 1:
            raise ServerError(f"{client.url}: serves {names}; name one with {client.named.model}")
        return bases[0]
    for entry in data:
        if wanted in (entry["id"], entry.get("root")):
            return entry
    raise ServerError(f"{client.url}: does not serve {wanted!r}; it serves {names}: correct {client.named.model}")
