"""Whatever a server does wrong: one clear ServerError within the deadline, never a number."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import subprocess
import time
from contextlib import suppress
from itertools import chain, cycle, repeat
from pathlib import Path
from typing import Any

import pytest
from fake_server import Handler, State, serving
from faulty_server import CHUNKED, DONE, STREAM, Fault, chunk, event, http, misbehaving

from headstart.data.serving import http as http_module
from headstart.data.serving.checks import one_line
from headstart.eval.config import EvalConfig
from headstart.eval.servers import answers, api_client, served
from headstart.eval.servers.served import evaluate_server
from headstart.heads.errors import ConfigError, ServerError

#: seconds beyond a deadline in which a busy machine may still end
SLACK = 4.0
STALL = [60.0]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines and bounds small enough to be met here."""
    for name, value in {
        "TIMEOUT": 0.7, "ERROR_TIMEOUT": 0.3, "PATIENCE": 0.6, "PER_TOKEN": 0.01,
        "PAGE": 1 << 16, "STREAM": 1 << 16, "TOKEN_BYTES": 1 << 8,
    }.items():  # fmt: skip
        monkeypatch.setattr(http_module if hasattr(http_module, name) else api_client, name, value)
    monkeypatch.setattr(answers, "LINE", 1 << 14)
    monkeypatch.setattr(served, "SETTLE", 0.3)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt_token_ids": [n]}) + "\n" for n in range(3)))
    return path


def refused(
    faults: dict[str, Fault], data: Path, match: str, engine: str = "vllm", key: str | None = None, **settings: Any
) -> str:
    """The message; checks that it comes in time and is fit for a terminal."""
    config = EvalConfig(data=str(data), max_new_tokens=64, warmup_tokens=0)
    with misbehaving(faults, engine=engine, **settings) as (url, _):
        began = time.monotonic()
        with pytest.raises(ServerError, match=match) as caught:
            evaluate_server(engine, url, config, key=key)
        assert time.monotonic() - began < 1.5 + SLACK
        said = str(caught.value)
        assert url in said and len(said) < 1000
        assert said.isprintable(), repr(said)
    return said


MODELS = {"data": [{"id": "tiny"}]}
WHOLE = http(MODELS)
HEAD, BODY = WHOLE.split(b"\r\n\r\n")
DEEP = b"[" * 10_000 + b"]" * 10_000

PAGES: dict[str, tuple[Any, str]] = {
    "closes at once": ([], "no answer in HTTP"),
    "is no HTTP": ([b"220 mail.example ESMTP\r\n"], "no answer in HTTP"),
    "bad status line": ([b"HTTP/1.1 abc OK\r\n\r\n"], "no answer in HTTP"),
    "status line without end": ([b"HTTP/1.1 200 " + b"x" * 200_000], "no answer in HTTP"),
    "a header too long": ([b"HTTP/1.1 200 OK\r\nX: ", b"x" * 200_000, b"\r\n\r\n"], "no answer in HTTP"),
    "too many headers": ([b"HTTP/1.1 200 OK\r\n", *([b"X: y\r\n" * 1000] * 100)], "no answer in HTTP"),
    "headers without end": (chain([b"HTTP/1.1 200 OK\r\n"], repeat(b"X: y\r\n" * 100)), "no answer in HTTP"),
    "a header that is none": ([b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n"], "no answer in HTTP"),
    "two lengths": ([http(MODELS, "200 OK", "Content-Length: 3")], "no answer in HTTP"),
    "continues without end": (repeat(b"HTTP/1.1 100 Continue\r\n\r\n"), "no whole answer within"),
    "switches protocols": ([b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n"], "no answer in HTTP"),
    "no content": ([http(b"", "204 No Content")], "HTTP 204"),
    "says nothing": (STALL, "no whole answer within 0.2 s"),
    "stalls in the status line": ([WHOLE[:7], 60.0], "no whole answer within"),
    "stalls in the headers": ([HEAD[:40], 60.0], "no whole answer within"),
    "stalls before the body": ([HEAD, b"\r\n\r\n", 60.0], "no whole answer within"),
    "drips": ((piece for byte in WHOLE for piece in (bytes([byte]), 0.05)), "no whole answer within"),
    "a body too long": ([http(b"x" * 100_000)], "longer than 65536 bytes"),
    "a body without end": (chain([STREAM], repeat(b"x" * 1000)), "longer than 65536 bytes"),
    "a body cut": ([http(MODELS, length=1000)], "the answer broke off"),
    "a chunk cut": ([CHUNKED, chunk(BODY, 1000)], "the answer broke off"),
    "cut between chunks": ([CHUNKED, chunk(BODY)], "the answer broke off"),
    "a chunk of no length": ([CHUNKED, b"zz\r\n" + BODY], "the answer broke off"),
    "a chunk of less than nothing": ([CHUNKED, b"-5\r\n" + BODY], "the answer broke off"),
    "compressed": ([http(BODY, "200 OK", "Content-Encoding: gzip")], "the answer comes as gzip"),
    "not JSON": ([http(b"<html>hello</html>")], "is not JSON"),
    "not UTF-8": ([http(b'{"data": "\xff\xfe"}')], "is not JSON.*utf-8"),
    "deep JSON": ([http(DEEP)], "nested too deeply"),
    "NaN": ([http(b'{"data": NaN}')], "NaN is not a number of JSON"),
    "a number of 5,000 digits": ([http(b'{"data": ' + b"1" * 5000 + b"}")], "is not JSON"),
    "half a pair": ([http(b'{"data": [{"id": "\\ud800"}]}')], r"found '\\ud800' as the id of a model"),
    "a list": ([http([MODELS])], "lists no model"),
    "models that are no list": ([http({"data": {"id": "tiny"}})], "lists no model"),
    "no model": ([http({"data": []})], "lists no model"),
    "models that are no objects": ([http({"data": ["tiny"]})], "found 'tiny' as the id of a model"),
    "a model without a name": ([http({"data": [{"id": 5}]})], "found 5 as the id of a model"),
    "a name that writes on the terminal": ([http({"data": [{"id": "\x1b[2J"}]})], "as the id of a model"),
    "wants a key": ([http(b"", "401 Unauthorized")], "wants an API key .HTTP 401.; set OPENAI_API_KEY"),
    "404, huge": (chain([CHUNKED.replace(b"200 OK", b"404 Not Found")], repeat(chunk(b"x" * 999))), "HTTP 404: x"),
    "500, slow": ([http(b"Oh", "500 Error", length=9), *[0.1, b"!"] * 90], "HTTP 500: Oh!"),
    "500, cut": ([http(b"Oh no", "500 Error", length=900)], "HTTP 500: Oh no$"),
    "502 that writes on a terminal": ([http("\x1b]0;me\x07\u202e\n".encode(), "502 Bad")], r"HTTP 502: \?\]0;me\?\?$"),
}  # fmt: skip


@pytest.mark.parametrize(("pieces", "match"), PAGES.values(), ids=PAGES)
def test_a_page_that_is_none(pieces: Any, match: str, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "within" in match:  # nothing else has to come in time
        monkeypatch.setattr(http_module, "TIMEOUT", 0.2)
    refused({"/v1/models": lambda _: pieces}, data, match)


@pytest.mark.parametrize("place", ["/metrics", "/version", "/v1/completions"])
def test_every_page_has_the_deadline(place: str, data: Path) -> None:
    refused({place: lambda _: STALL}, data, "within")


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "307 Temporary", "308 Permanent"])
@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions", "/metrics"])
def test_no_redirect_is_followed_and_none_gets_the_key(status: str, path: str, data: Path) -> None:
    with serving() as (other, state):
        for place in (other + path, other.replace("//", "//me:secret@") + path, "/elsewhere", "file:///etc/passwd", ""):
            answer = http(b"", status, f"Location: {place}")
            said = refused({path: lambda _, answer=answer: [answer]}, data, f"HTTP {status[:3]}", key="sesame")
            assert "redirects are not followed" in said and "secret" not in said and "sesame" not in said
        assert state.requests == []


FULL = [STREAM, event(1), event(3)]
STREAMS: dict[str, tuple[Any, str]] = {
    "no [DONE]": (FULL, r"ended after 3 tokens and without \[DONE\]"),
    "[DONE] cut": ([*FULL, DONE[:-4]], r"without \[DONE\]"),
    "nothing at all": ([STREAM], "ended after 0 tokens"),
    "only [DONE]": ([STREAM, DONE], "did not say how many tokens"),
    "a chunk cut": ([CHUNKED, chunk(event(1)), chunk(event(3), 999)], "the answer broke off"),
    "cut between chunks": ([CHUNKED, chunk(event(1)), chunk(event(3))], "the answer broke off"),
    "stalls before the first event": ([STREAM, 60.0], "0 tokens came, and no further one within 0.6 s"),
    "stalls between events": ([*FULL, 60.0], "3 tokens came, and no further one within"),
    "stalls before [DONE]": ([*FULL, DONE[:9], 60.0], "3 tokens came, and no further one within"),
    "keeps alive slowly": (chain(FULL, cycle([b": ping\n\n", 0.05])), "3 tokens came, and no further one"),
    "keeps alive fast": (chain(FULL, repeat(b": ping\n\n" * 500)), "the stream is longer than"),
    "no token for many events": (chain(FULL, cycle([event(3), 0.02])), "3 tokens came, and no further one"),
    "slower than the limit": (
        chain([STREAM], (piece for n in range(1, 60) for piece in (event(n), 0.2))), r"of 64 tokens came within 1.24",
    ),
    "a line without end": (chain(FULL, [b"data: "], repeat(b"x" * 1000)), "a line of the stream is longer"),
    "not UTF-8": ([STREAM, b"data: \xff\n\n"], "is not JSON"),
    "not JSON": ([STREAM, b"data: {\n\n"], "is not JSON"),
    "deep JSON": ([STREAM, b"data: " + b"[" * 9000 + b"\n\n"], "nested too deeply"),
    "one answer instead of a stream": ([http({"choices": [], "usage": {"completion_tokens": 3}})], r"without \[DONE\]"),
    "an event that is a list": ([STREAM, b"data: []\n\n"], "an event of the stream is a list"),
    "usage that is a list": ([STREAM, event(usage=[1])], "usage: found a list, expected an object"),
    "choices that are an object": ([STREAM, event(choices={})], "choices: found an object, expected a list"),
    "a choice that is text": ([STREAM, event(choices=["w"])], "choices: found 'w', expected objects"),
    "a delta that is a list": ([STREAM, event(choices=[{"delta": []}])], "delta: found a list"),
    "text that is a number": ([STREAM, event(choices=[{"text": 5}])], "text: found 5, expected text"),
    "finish_reason that is a list": ([STREAM, event(choices=[{"finish_reason": ["stop"]}])], "_reason: found a list"),
    "given up": ([STREAM, event(2, choices=[{"finish_reason": "abort"}]), DONE], "gave up an answer"),
    "sglext that is a list": ([STREAM, event(sglext=[])], "sglext: found a list"),
    "details that are text": ([STREAM, event(choices=[{"meta_info": "x"}])], "details of the speculation: found 'x'"),
    "tokens as text": ([STREAM, event("3")], "completion_tokens: found '3', expected a whole number from 0 to 64"),
    "tokens as a fraction": ([STREAM, event(3.5)], "completion_tokens: found 3.5"),
    "tokens as a float": ([STREAM, event(3.0)], "completion_tokens: found 3.0"),
    "tokens as a truth value": ([STREAM, event(True)], "completion_tokens: found True"),
    "tokens as a list": ([STREAM, event([3])], "completion_tokens: found a list"),
    "less than no tokens": ([STREAM, event(-3)], "completion_tokens: found -3"),
    "more tokens than asked for": ([STREAM, event(65)], "completion_tokens: found 65, expected .* to 64"),
    "tokens without number": ([STREAM, event(10**400)], "completion_tokens: found 1000"),
    "tokens that go back": ([*FULL, event(2)], "completion_tokens: found 2, expected a whole number from 3"),
    "an error": (
        [STREAM, event(error={"message": "\x1b[31mout of\nmemory" + "!" * 9000}), DONE], r": \?\[31mout of memory!+…",
    ),
    "an error as older vLLMs say it": (
        [*FULL, b'data: {"object": "error", "message": "no memory", "code": 500}\n\n', DONE], "an error: no memory",
    ),
    "two answers": ([STREAM, event(2, choices=[{"index": 0}, {"index": 1}]), DONE], "one answer was asked.*found 1"),
    "an error that is a list": ([STREAM, event(error=[[[]]]), DONE], "reports an error: a list"),
    "400": ([http({"error": "max_tokens"}, "400 Bad Request")], "HTTP 400.*max_tokens"),
}  # fmt: skip


@pytest.mark.parametrize(("pieces", "match"), STREAMS.values(), ids=STREAMS)
def test_a_stream_that_is_no_answer(pieces: Any, match: str, data: Path) -> None:
    refused({"/v1/completions": lambda _: pieces}, data, match)


def test_one_bad_answer_of_many_ends_the_others(data: Path) -> None:
    def second(state: State) -> Any:
        with state.lock:
            state.finished += 1
            return [*FULL] if state.finished == 2 else STALL

    with misbehaving({"/v1/completions": second}) as (url, _), pytest.raises(ServerError, match="without"):
        evaluate_server("vllm", url, EvalConfig(data=str(data), batch_size=3, warmup_tokens=0))


def counters(**replaced: str) -> Fault:
    """The metrics with some counters' values replaced once an answer was counted."""

    def page(state: State) -> Any:
        lines = []
        for line in state.metrics_text().splitlines():
            name = line.partition("{")[0].removeprefix("vllm:").removeprefix("spec_decode_num_").removesuffix("_total")
            if name in replaced and state.finished and "another" not in line:
                line = line.rpartition(" ")[0] + " " + replaced[name]
            lines.append(line)
        return [http(("\n".join(lines) + "\n").encode())]

    return page


def text(change: Any) -> Fault:
    return lambda state: [http(change(state.metrics_text(), state).encode())]


COUNTERS: dict[str, tuple[Fault, str]] = {
    "NaN": (counters(drafts="NaN"), "num_drafts_total: found nan, expected a whole number"),
    "infinite": (counters(accepted_tokens="+Inf"), "found inf"),
    "negative": (counters(drafts="-3"), "found -3"),
    "huge": (counters(drafts="1e300"), r"found 1e\+300"),
    "a fraction": (counters(drafts="2.5"), "found 2.5"),
    "far too many": (counters(drafts="1e12"), "1000000000000 drafts for .* contradict each other"),
    "fewer drafts than messages": (
        counters(drafts="2", accepted_tokens="6", accepted_tokens_per_pos="2"), "2 forwards cannot .* in 3 messages",
    ),
    "by position, not as a whole": (counters(accepted_tokens="1"), "1 accepted drafts, and . by position"),
    "more accepted than drafted": (counters(accepted_tokens_per_pos="9", accepted_tokens="27"), "contradict"),
    "finished, infinite": (counters(request_success="Inf"), "request_success_total: found inf"),
    "never move": (counters(request_success="0"), "counted 0 finished requests"),
    "vanish": (text(lambda page, state: "vllm:x 1\n" if state.finished else page), "a counter went back, came or went"),
    "one vanishes": (
        text(lambda page, state: page.replace("num_drafts_total", "gone") if state.finished else page),
        "a counter went back, came or went",
    ),
    "a position more": (
        text(lambda page, state: page.replace('position="2"', f'position="{2 + 2 * state.finished}"')), "with no gap",
    ),
    "a position that is none": (text(lambda page, _: page.replace('"2"', '"²"')), "found position '²'"),
    "not UTF-8": (lambda state: [http(state.metrics_text().encode() + b"\xff\n")], "the page is not UTF-8 text"),
    "cut within a line": (text(lambda page, _: page[:-7]), "ends within a line"),
    "of another model": (text(lambda page, _: page.replace('"tiny"', '"base"')), "for another, base, and not for"),
    "huge page": (text(lambda page, _: page + "x 1\n" * 30_000), "longer than 65536 bytes"),
    "one long line": (text(lambda page, _: "x{" + 'a="b",' * 9000 + "\n"), "holds no vllm: metrics"),
}  # fmt: skip


@pytest.mark.parametrize(("fault", "match"), COUNTERS.values(), ids=COUNTERS)
def test_counters_that_cannot_be(fault: Fault, match: str, data: Path) -> None:
    refused({"/metrics": fault}, data, match)


def test_counters_that_go_back(data: Path) -> None:
    """A server that was restarted between two readings."""

    def restarted(state: State) -> Any:
        if state.finished > 1 and state.drafts:
            state.finished, state.drafts, state.accepted, state.reached = 0, 0, 0, [0, 0, 0]
        return None

    refused({"/metrics": restarted}, data, "a counter went back.*restarted")


def test_many_tokens_without_a_draft(data: Path) -> None:
    def counts_requests_only(state: State) -> Any:
        state.drafts, state.accepted, state.reached = 0, 0, [0, 0, 0]
        return None

    scripts = [[3] * 16]
    refused({"/metrics": counts_requests_only}, data, "generated 189 tokens and says that it drafted", scripts=scripts)


MERGED: dict[str, Any] = {"histogram": False, "merge": True}
HISTOGRAM_OF_60 = {"spec_correct_drafts_histogram": [60]}
SGLANG: dict[str, tuple[dict[str, Any], str]] = {
    "steps as text": ({"info": {"speculative_num_steps": "3"}}, "speculative_num_steps: found '3'"),
    "steps without number": ({"info": {"speculative_num_steps": 10**9}}, "speculative_num_steps: found 1000000000"),
    "width as a list": ({"info": {"speculative_eagle_topk": [1]}}, "speculative_eagle_topk: found a list"),
    "algorithm as a number": ({"info": {"speculative_algorithm": 3}}, "speculative_algorithm: found 3"),
    "histogram as text": ({"details": {"spec_correct_drafts_histogram": "1"}}, "histogram: found '1'"),
    "histogram of text": ({"details": {"spec_correct_drafts_histogram": ["1"]}}, "histogram: found '1'"),
    "histogram of truth values": ({"details": {"spec_correct_drafts_histogram": [True]}}, "histogram: found True"),
    "less than nothing": ({"details": {"spec_correct_drafts_histogram": [3, -1]}}, "histogram: found -1"),
    "huge bins": ({"details": {"spec_correct_drafts_histogram": [10**15]}}, "histogram: found 1000000000000000"),
    "many bins": ({"details": {"spec_correct_drafts_histogram": [0] * 2000 + [1]}}, "found 2001 bins"),
    "too deep": ({"details": {"spec_correct_drafts_histogram": [0] * 4 + [2]}}, "found 4 drafts accepted"),
    "two counts of forwards": ({"details": {"spec_correct_drafts_histogram": [4]}}, "3 verifications, and 4 by"),
    "more forwards than tokens": ({"verify_count": False, "details": HISTOGRAM_OF_60}, "60 drafts for 7 tokens"),
    "verifications as text": ({"histogram": False, "details": {"spec_verify_ct": "3"}}, "spec_verify_ct: found '3'"),
    "no verifications": (MERGED | {"details": {"spec_verify_ct": 0}}, "0 forwards for 7 tokens contradict"),
    "too few verifications": (MERGED | {"details": {"spec_verify_ct": 1}}, "7.00 tokens per forward"),
    "too many verifications": (MERGED | {"details": {"spec_verify_ct": 60}}, "60 forwards for 7 tokens"),
    "fewer than messages": ({"histogram": False, "details": {"spec_verify_ct": 2}}, "2 forwards .* in 3 messages"),
}  # fmt: skip


@pytest.mark.parametrize(("given", "match"), SGLANG.values(), ids=SGLANG)
def test_what_sglang_cannot_mean(given: dict[str, Any], match: str, data: Path) -> None:
    refused({}, data, match, engine="sglang", **given)


@pytest.mark.parametrize("mean", [float("inf"), -2.0, 0.5, 100.0, "2.5", True, [2]])
def test_a_mean_length_that_cannot_be(mean: Any, data: Path) -> None:
    said_by_nothing_else = {"histogram": False, "verify_count": False, "counter": False, "mean_length": mean}
    refused({}, data, "accept.length|is not JSON", engine="sglang", **said_by_nothing_else)


def test_optional_pages_that_are_broken_are_not_taken_for_missing(data: Path) -> None:
    refused({"/version": lambda _: [http(["0.32.0"])]}, data, "/version: found a list, expected an object")
    refused({"/server_info": lambda _: [http(b"{")]}, data, "/server_info: .*not JSON", engine="sglang")


def test_nobody_accepts_the_connection(data: Path) -> None:
    with socket.socket() as listener, socket.socket() as first, socket.socket() as second:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for waiting in (first, second):  # they fill the queue, so that the next one's handshake gets no answer
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        began = time.monotonic()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ServerError, match="no server answers there|no whole answer"):
            evaluate_server("vllm", url, EvalConfig(data=str(data)))
        assert time.monotonic() - began < 0.7 + SLACK


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate")
def test_a_certificate_of_ones_own_authority(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-days", "1"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate, *names]
    subprocess.run(command, check=True, capture_output=True)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    config = EvalConfig(data=str(data), warmup_tokens=0)
    with serving(tls=tls) as (url, _):
        named = url.replace("127.0.0.1", "localhost")
        with pytest.raises(ServerError, match="certificate is not trusted here .*set SSL_CERT_FILE"):
            evaluate_server("vllm", named, config)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert evaluate_server("vllm", named, config).tau == pytest.approx(8 / 3)
        with pytest.raises(ServerError, match="not trusted here .*Give --url the name that the certificate is for"):
            evaluate_server("vllm", url, config)
    with serving() as (url, _), pytest.raises(ServerError, match="no TLS is spoken there"):
        evaluate_server("vllm", url.replace("http:", "https:"), config)


class Unusual(Handler):
    """Right, as other servers are: chunks of one byte, CRLF, comments and fields beside the data, UTF-8."""

    protocol_version = "HTTP/1.1"
    EVENTS = (
        ": wait\r\n\r\n" * 9,
        'data: {"choices":[{"index":0,"text":"a"}],"usage":{"completion_tokens":1}}\r\n\r\n',
        'event: message\r\nid: 4\r\nretry: 9\r\ndata:{"choices":[{"text":"\u00fc"}],"usage":null}\r\n\r\n',
        'data: {"choices":[{"text":"b","finish_reason":"stop"}],"usage":{"completion_tokens":5}}\r\n\r\n',
        "data: [DONE]\r\n\r\n",
    )

    def do_GET(self) -> None:
        self.path = self.path.removeprefix("/team/api")
        super().do_GET()

    def do_POST(self) -> None:
        assert self.path == "/team/api/v1/completions"
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with suppress(OSError):  # the client leaves at [DONE], before the last bytes
            for byte in "".join(self.EVENTS).encode():
                self.wfile.write(b"1\r\n" + bytes([byte]) + b"\r\n")
            self.wfile.write(b"0\r\n\r\n")
        self.server.state.count([1, 1])  # type: ignore[attr-defined]


class Old(Handler):
    protocol_version = "HTTP/1.0"


@pytest.mark.parametrize(
    ("handler", "path", "tau"),
    [(Unusual, "/team/api", 2), (Unusual, "/team/api/v1/", 2), (Old, "/", 8 / 3), (Old, "/v1 ", 8 / 3)],
)
def test_a_server_that_is_right_in_its_own_way(
    handler: type[Handler], path: str, tau: float, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # it gets as long as users give it: this machine may be busy
    with serving(handler) as (url, _):
        report = evaluate_server("vllm", url + path, EvalConfig(data=str(data), max_new_tokens=64, warmup_tokens=0))
    assert report.tau == pytest.approx(tau)


@pytest.mark.parametrize("name", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
def test_a_proxy_of_the_environment_is_not_asked_for_this_machine(
    name: str, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with serving() as (url, _):
        for address in (url, url.replace("127.0.0.1", "localhost")):
            assert evaluate_server("vllm", address, EvalConfig(data=str(data), warmup_tokens=0)).tau > 1
    with pytest.raises(ServerError, match="http://server.invalid:8000: no server answers there"):
        evaluate_server("vllm", "http://server.invalid:8000", EvalConfig(data=str(data)))
    monkeypatch.setenv(name, "nonsense://me:secret@x")
    with pytest.raises(ConfigError, match="the environment's proxy .* set NO_PROXY=server.invalid") as caught:
        evaluate_server("vllm", "http://server.invalid:8000", EvalConfig(data=str(data)))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd", "ftp://x", "http://", "http://x:99999", "http://x:0", "http://me:secret@x:1",
        "me:secret@x:1", "http://me:sec/ret@x:1", "http://me:secret@x:y", "http://x?key=secret", "http://x#secret", "http://x\x1b[31m",
        "", "http://secret@\n", "http://" + "x" * 99_999,
    ],
)  # fmt: skip
def test_addresses_that_are_none(url: str, data: Path) -> None:
    with pytest.raises(ConfigError, match="--url: found") as caught:
        evaluate_server("vllm", url, EvalConfig(data=str(data)))
    said = str(caught.value)
    assert said.isprintable() and len(said) < 500
    assert not any(part in said for part in ("secret", "sec/ret", "me:sec", "ret@"))


def test_a_key_that_no_header_carries(data: Path) -> None:
    for key in ("two words", "line\nbreak", "schlüssel"):
        with pytest.raises(ConfigError, match="OPENAI_API_KEY: holds characters") as caught:
            evaluate_server("vllm", "http://127.0.0.1:9", EvalConfig(data=str(data)), key=key)
        assert key not in str(caught.value)


def test_inside_a_running_event_loop(data: Path) -> None:
    """A notebook has one."""
    import asyncio

    async def cell() -> float:
        return evaluate_server("vllm", url, EvalConfig(data=str(data), warmup_tokens=0)).tau

    with serving() as (url, _):
        assert asyncio.run(cell()) > 1


def test_the_command_line_says_it_without_a_traceback(data: Path, capfd: Any) -> None:
    from headstart.cli import main

    error = http(b"\x1b[31m[bold]no\x00", "500 Error")
    with misbehaving({"/metrics": lambda _: [error]}) as (url, _):
        assert main(["eval", "--engine", "vllm", "--url", url, "--data", str(data)]) == 1
    said = capfd.readouterr().err
    assert "Traceback" not in said and "\x1b[31m" not in said and "\x00" not in said
    assert "/metrics: HTTP 500: ?[31m[bold]no?" in said and "--disable-log-stats" in said


def test_what_is_shown() -> None:
    assert one_line("a\r\n\tb\x07\u202e\ud800c") == "a b???c" and one_line("x" * 500, 10) == "x" * 9 + "…"
