"""Reads from vLLM and SGLang what their speculation accepted, and makes cycles of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from headstart.data.serving.checks import found, one_line, optional, whole
from headstart.data.serving.http import StatusError
from headstart.eval.config import EvalConfig
from headstart.eval.decoding.decode import Cycle
from headstart.eval.servers.answers import Served
from headstart.eval.servers.api_client import Client
from headstart.eval.servers.counters import (
    DEEPEST,
    Metrics,
    cycles_from_counts,
    cycles_of_steps,
    cycles_without_positions,
    parse_metrics,
    reached_of_histogram,
)
from headstart.heads.errors import ConfigError, ServerError


@dataclass
class Reading:
    """A server's counters at one moment, or what they grew by.

    Attributes:
        finished: requests.
        drafts: forwards that verified a draft; None where the server has no such counter.
        accepted, reached: accepted drafts, and forwards that accepted depth 1, 2, …
    """

    finished: int
    drafts: int | None
    accepted: int
    reached: list[int]

    def since(self, before: Reading, where: str) -> Reading:
        """What the counters grew by. Raises: ServerError where one became smaller, appeared or vanished."""
        pairs = [(self.finished, before.finished), (self.accepted, before.accepted)]
        pairs += [*zip(self.reached, before.reached, strict=False), (self.drafts or 0, before.drafts or 0)]
        same = len(self.reached) == len(before.reached) and (self.drafts is None) == (before.drafts is None)
        if not same or any(now < then for now, then in pairs):
            raise ServerError(
                f"{where}: a counter went back, came or went between two readings: the server was restarted, or "
                "several servers answer at this address. Measure one server that keeps running"
            )
        drafts = None if self.drafts is None or before.drafts is None else self.drafts - before.drafts
        reached = [now - then for now, then in zip(self.reached, before.reached, strict=True)]
        return Reading(self.finished - before.finished, drafts, self.accepted - before.accepted, reached)


class Vllm:
    """vLLM: `vllm:spec_decode_*` counters on /metrics."""

    #: fields of a request with tools. Without "none" vLLM would need a parser of their calls
    with_tools: ClassVar[dict[str, Any]] = {"tool_choice": "none"}
    DRAFTS = "vllm:spec_decode_num_drafts"

    def __init__(self, client: Client, model: str):
        self.client, self.model, self.where = client, model, f"{client.url}/metrics"
        self.version = _version(client.maybe_json("/version"))
        metrics = self._metrics()
        if not metrics.has(self.DRAFTS) and metrics.others:
            raise ServerError(
                f"{self.where}: counts for {one_line(', '.join(metrics.others), 200)}, and not for {model!r}: name the "
                "model with --model as the metrics do"
            )
        if not metrics.has(self.DRAFTS):
            raise ServerError(
                f"{client.url}: the server runs without speculation (no vllm:spec_decode_* counters): start it with "
                '--speculative-config \'{"method": …, "model": …, "num_speculative_tokens": …}\''
            )
        self.depth = len(metrics.by_position("vllm:spec_decode_num_accepted_tokens_per_pos"))
        #: most tokens that a forward gives
        self.most: int | None = self.depth + 1
        #: forwards counted so far that verified a draft
        self.verified = 0
        self.tree = {"kind": "chain", "depth": self.depth, "label": f"chain{self.depth}"}
        self.drafter = f"speculation in vLLM {self.version}"

    @staticmethod
    def request_fields(config: EvalConfig) -> dict[str, Any]:
        """Fields of a request beyond OpenAI's. They set what the server's generation_config would set otherwise."""
        return {"top_k": config.top_k, "repetition_penalty": config.repetition_penalty}

    def _metrics(self) -> Metrics:
        try:
            samples = parse_metrics(_page(self.client))
        except StatusError as error:
            raise ServerError(
                f"{self.where}: cannot be read ({error}). --engine vllm needs vLLM's own address, with "
                "statistics on (no --disable-log-stats)"
            ) from error
        if not any(s.name.startswith("vllm:") for s in samples):
            raise ServerError(
                f"{self.where}: holds no vllm: metrics: start the server without --disable-log-stats, "
                "or name another --engine"
            )
        return Metrics(samples, self.model, self.where)

    def read(self) -> Reading:
        metrics, prefix = self._metrics(), "vllm:spec_decode_num_"
        return Reading(
            metrics.total("vllm:request_success"),
            metrics.total(self.DRAFTS) if metrics.has(self.DRAFTS) else None,
            metrics.total(f"{prefix}accepted_tokens"),
            metrics.by_position(f"{prefix}accepted_tokens_per_pos"),
        )

    def needs_counters(self, answers: list[Served]) -> bool:
        """Whether acceptance comes from the counters, and not from the answers themselves."""
        return True

    def settled(self, grown: Reading, answers: list[Served]) -> bool:
        """Whether the counters hold all answers."""
        return grown.finished >= len(answers)

    def cycles(self, grown: Reading, answers: list[Served]) -> list[Cycle]:
        """Cycles of `answers`. Raises: ValueError where the counters contradict each other or the answers."""
        if grown.accepted != sum(grown.reached):
            raise ValueError(f"counters: {grown.accepted} accepted drafts, and {sum(grown.reached)} by position")
        last = answers[0].steps[-1] if len(answers) == 1 and answers[0].seen else None
        committed = sum(answer.committed for answer in answers)
        self.verified += grown.drafts or 0
        cycles = cycles_from_counts(grown.drafts or 0, grown.reached, committed, last if committed else None)
        _check_messages(len(cycles), answers)
        return cycles

    def notes(self) -> list[str]:
        return []


class Sglang:
    """SGLang: acceptance comes from what it adds to each answer, its counter of verifications, or its mean length."""

    with_tools: ClassVar[dict[str, Any]] = {}
    VERIFICATIONS = "sglang:spec_verify_calls"
    #: algorithms whose forwards accept at most one draft per step; others verify a block of draft tokens
    STEPWISE = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")

    def __init__(self, client: Client, model: str):
        self.client, self.model, self.where = client, model, client.url
        info = self._info()
        self.version = _version(info)
        algorithm = optional(info.get("speculative_algorithm"), str, f"{self.where}: speculative_algorithm")
        if info and not algorithm:
            raise ServerError(
                f"{client.url}: the server runs without speculation (speculative_algorithm is null): start it with "
                "--speculative-algorithm EAGLE3 --speculative-draft-model-path …"
            )
        self.depth, width, total = (
            whole(info.get(f"speculative_{name}") or 0, f"{self.where}: speculative_{name}", 0, DEEPEST)
            for name in ("num_steps", "eagle_topk", "num_draft_tokens")
        )
        width = width or 1
        label = f"chain{self.depth}" if width == 1 else f"tree{total}"
        self.tree = {"kind": "chain" if width == 1 else "dynamic", "depth": self.depth, "k": width, "label": label}
        self.drafter = f"{one_line(algorithm or 'speculation', 40).lower()} in SGLang {self.version}"
        stepwise = (algorithm or "").upper() in self.STEPWISE
        #: most tokens that a forward gives; None where the server does not say, or changes it while it runs
        self.most: int | None = (self.depth + 1 if stepwise and self.depth else max(self.depth + 1, total)) or None
        if info.get("speculative_adaptive") or not (self.depth or total):
            self.most = None
        self.verified = 0
        self._sources: set[str] = set()

    @staticmethod
    def request_fields(config: EvalConfig) -> dict[str, Any]:
        """As Vllm's, in SGLang's spelling. They also ask for counts, which older versions do not send."""
        if config.repetition_penalty != 1.0:
            raise ConfigError(
                f"eval.repetition_penalty: found {config.repetition_penalty:g}; SGLang penalises generated tokens, "
                "Headstart's loop those of the prompt as well, so that the two do not compare: set it to 1"
            )
        details = {"return_meta_info": True, "return_spec_tokens_details": True}
        return {"top_k": config.top_k or -1, "repetition_penalty": 1.0, **details}

    def _info(self) -> dict[str, Any]:
        return self.client.maybe_json("/get_server_info", "/server_info")

    def _metrics(self) -> Metrics | None:
        try:
            return Metrics(parse_metrics(_page(self.client)), self.model, f"{self.where}/metrics")
        except StatusError:  # runs without --enable-metrics
            return None

    def read(self) -> Reading:
        metrics = self._metrics()
        if metrics is None or not metrics.has(self.VERIFICATIONS):
            return Reading(0, None, 0, [])
        return Reading(metrics.total("sglang:num_requests"), metrics.total(self.VERIFICATIONS), 0, [])

    def needs_counters(self, answers: list[Served]) -> bool:
        return not all("spec_verify_ct" in answer.details for answer in answers)

    def settled(self, grown: Reading, answers: list[Served]) -> bool:
        if not self.needs_counters(answers) or grown.drafts is None:
            return True
        return grown.finished >= len(answers) and (grown.drafts > 0 or not any(a.committed for a in answers))

    def cycles(self, grown: Reading, answers: list[Served]) -> list[Cycle]:
        """Cycles of `answers`. Raises: ValueError where the counts contradict each other; ServerError without any."""
        committed = sum(answer.committed for answer in answers)
        histograms = [self._histogram(answer) for answer in answers]
        known = [histogram for histogram in histograms if histogram is not None]
        if len(known) == len(answers):
            self._sources.add("the acceptance histogram of each answer")
            self.verified += sum(map(sum, known))
            pairs = zip(known, answers, strict=True)
            cycles = [cycle for histogram, answer in pairs for cycle in self._of_histogram(histogram, answer)]
            _check_messages(len(cycles), answers)
            return cycles
        forwards, source = self._forwards(grown, answers, committed)
        self.verified += forwards
        steps = [step for answer in answers for step in answer.steps[1:]]
        if all(answer.seen for answer in answers) and len(steps) == forwards:
            deepest = max(steps, default=0)
            if self.most is not None and deepest > self.most:
                raise ValueError(f"the stream: {deepest} tokens of one forward, which gives {self.most} at most")
            if deepest <= self.depth + 1:
                self._sources.add(f"{source}, positions from the stream")
                return cycles_of_steps(steps, self.depth)
        self._sources.add(f"{source}; acceptance by position is not reported by this server")
        return cycles_without_positions(forwards, committed)

    def _of_histogram(self, histogram: list[int], answer: Served) -> list[Cycle]:
        forwards, reached = reached_of_histogram(histogram, self.depth)
        said = answer.details.get("spec_verify_ct")
        if said is not None and said != forwards:
            raise ValueError(f"an answer: {found(said)} verifications, and {forwards} by accepted drafts")
        return cycles_from_counts(forwards, reached, answer.committed, answer.steps[-1] if answer.seen else None)

    def _histogram(self, answer: Served) -> list[int] | None:
        """Verifications by number of accepted drafts; SGLang has had two names for them."""
        names = ("spec_correct_drafts_histogram", "spec_accept_histogram")
        name = next((n for n in names if answer.details.get(n)), "")
        counts = optional(answer.details.get(name), list, f"{self.where}: {name}")
        if counts is None:
            return None
        if len(counts) > DEEPEST:
            raise ServerError(f"{self.where}: {name}: found {len(counts)} bins, expected {DEEPEST} at most")
        checked = [whole(count, f"{self.where}: {name}", 0, answer.limit) for count in counts]
        while len(checked) > max(self.depth + 1, 1) and not checked[-1]:
            checked.pop()
        if self.most is not None and len(checked) > self.most:
            best = len(checked) - 1
            raise ServerError(f"{self.where}: {name}: found {best} drafts accepted, expected {self.most - 1} at most")
        return checked

    def _forwards(self, grown: Reading, answers: list[Served], committed: int) -> tuple[int, str]:
        if not self.needs_counters(answers):
            name = f"{self.where}: spec_verify_ct"
            forwards = sum(whole(answer.details["spec_verify_ct"], name, 0, answer.limit) for answer in answers)
            _check_messages(forwards, answers)
            return forwards, "the verifications of each answer"
        if grown.drafts is not None and (grown.drafts or not committed):
            _check_messages(grown.drafts, answers)
            return grown.drafts, f"the counter {self.VERIFICATIONS}_total"
        metrics = self._metrics()
        mean = _mean_length(self._info(), self.where)
        source = "the server's mean accept length since it started (avg_spec_accept_length)"
        if mean is None and metrics is not None:
            mean, source = metrics.mean("sglang:spec_accept_length"), "the gauge sglang:spec_accept_length (a window)"
        if not mean:
            raise ServerError(
                f"{self.client.url}: the server says nothing about acceptance: neither answers (return_meta_info) nor "
                "/get_server_info nor /metrics. Start it with --enable-metrics and speculation on, or name another "
                "--engine."
            )
        if not 1 <= mean <= (self.most or DEEPEST):
            raise ServerError(
                f"{self.where}: found a mean accept length of {mean:g}, expected 1 to {self.most or DEEPEST}"
            )
        return max(round(committed / mean), 1) if committed else 0, source

    def notes(self) -> list[str]:
        return [f"τ comes from {source}" for source in sorted(self._sources)]


def _check_messages(forwards: int, answers: list[Served]) -> None:
    """Raises ValueError where more messages brought tokens than forwards made them (without each answer's first)."""
    messages = sum(max(len(answer.steps) - 1, 0) for answer in answers)
    if messages > forwards:
        raise ValueError(f"{forwards} forwards cannot have brought tokens in {messages} messages")


def _page(client: Client) -> str:
    """The page of metrics. Raises: ServerError where it ends within a line, so that counters may be missing."""
    text = client.text("/metrics")
    if text and not text.endswith("\n"):
        raise ServerError(f"{client.url}/metrics: the page ends within a line: it is not whole")
    return text


def _version(info: dict[str, Any]) -> str:
    said = info.get("version")
    return one_line(said, 60) if isinstance(said, str) and said else "unknown"


def _mean_length(info: dict[str, Any], where: str) -> float | None:
    """Mean accept length over the engines that report one, or None. Raises: ServerError for a value that is none."""
    states = info.get("internal_states")
    name = f"{where}: avg_spec_accept_length"
    values = []
    for state in states if isinstance(states, list) else []:
        value = state.get("avg_spec_accept_length") if isinstance(state, dict) else None
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ServerError(f"{name}: found {found(value)}, expected a number")
        if value:
            values.append(value)
    if not values:
        return None
    if not all(-math.inf < value < math.inf and abs(value) < 1e9 for value in values):
        raise ServerError(f"{name}: found {found(max(values, key=abs))}, expected 1 to {DEEPEST}")
    return sum(values) / len(values)


ENGINES: dict[str, type[Vllm] | type[Sglang]] = {"vllm": Vllm, "sglang": Sglang}
