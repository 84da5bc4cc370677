"""Where vLLM and SGLang say what their speculation accepted, and the cycles that follow from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headstart.eval.api_client import Client, Served
from headstart.eval.counters import (
    Metrics,
    cycles_from_counts,
    cycles_of_steps,
    cycles_without_positions,
    parse_metrics,
    reached_of_histogram,
)
from headstart.eval.decode import Cycle
from headstart.heads.errors import ServerError


@dataclass
class Reading:
    """Counters of a server at one moment."""

    finished: int
    drafts: int
    accepted: int
    reached: list[int]


class Vllm:
    """vLLM: `vllm:spec_decode_*` counters on /metrics."""

    name = "vLLM"
    extra: dict[str, Any] = {}

    def __init__(self, client: Client, model: str):
        self.client, self.model = client, model
        self.version = str(client.maybe_json("/version").get("version", "unknown"))
        metrics = self._metrics()
        if not metrics.has("vllm:spec_decode_num_drafts"):
            raise ServerError(
                f"{client.url}: the server runs without speculation (no vllm:spec_decode_* counters): start it with "
                '--speculative-config \'{"method": …, "model": …, "num_speculative_tokens": …}\''
            )
        self.depth = len(metrics.by_position("vllm:spec_decode_num_accepted_tokens_per_pos"))
        self.tree = {"kind": "chain", "depth": self.depth, "label": f"chain{self.depth}"}
        self.drafter = f"speculation in vLLM {self.version}"

    def _metrics(self) -> Metrics:
        try:
            samples = parse_metrics(self.client.text("/metrics"))
        except ServerError as error:
            raise ServerError(
                f"{self.client.url}/metrics: cannot be read ({error}). --engine vllm needs vLLM's own address, with "
                "statistics on (no --disable-log-stats)"
            ) from error
        if not any(s.name.startswith("vllm:") for s in samples):
            raise ServerError(
                f"{self.client.url}/metrics: holds no vllm: metrics: start the server without --disable-log-stats, "
                "or name another --engine"
            )
        return Metrics(samples, self.model)

    def read(self) -> Reading:
        found, prefix = self._metrics(), "vllm:spec_decode_num_"
        return Reading(
            round(found.total("vllm:request_success")),
            round(found.total(f"{prefix}drafts")),
            round(found.total(f"{prefix}accepted_tokens")),
            found.by_position(f"{prefix}accepted_tokens_per_pos"),
        )

    def counts(self, answers: list[Served]) -> bool:
        """Whether the counters are needed, rather than what the answers themselves say."""
        return True

    def settled(self, before: Reading, now: Reading, answers: list[Served]) -> bool:
        return now.finished - before.finished >= len(answers)

    def cycles(self, before: Reading, after: Reading, answers: list[Served]) -> list[Cycle]:
        last = answers[0].steps[-1] if len(answers) == 1 and answers[0].seen else None
        reached = [b - a for a, b in zip(before.reached, after.reached, strict=True)]
        committed = sum(answer.committed for answer in answers)
        return cycles_from_counts(after.drafts - before.drafts, reached, committed, last if committed else None)

    def notes(self) -> list[str]:
        return []


class Sglang:
    """SGLang: what it adds to each answer, its counter of verifications, or its mean accept length."""

    name = "SGLang"
    #: asks for the request's own speculation counts; versions that do not know a field leave it out
    extra: dict[str, Any] = {"return_meta_info": True, "return_spec_tokens_details": True}
    VERIFICATIONS = "sglang:spec_verify_calls"

    def __init__(self, client: Client, model: str):
        self.client, self.model = client, model
        info = self._info()
        self.version = str(info.get("version", "unknown"))
        algorithm = info.get("speculative_algorithm")
        if info and not algorithm:
            raise ServerError(
                f"{client.url}: the server runs without speculation (speculative_algorithm is null): start it with "
                "--speculative-algorithm EAGLE3 --speculative-draft-model-path …"
            )
        self.depth = int(info.get("speculative_num_steps") or 0)
        width, total = info.get("speculative_eagle_topk") or 1, info.get("speculative_num_draft_tokens") or 0
        label = f"chain{self.depth}" if width == 1 else f"tree{total}"
        self.tree = {"kind": "chain" if width == 1 else "dynamic", "depth": self.depth, "k": width, "label": label}
        self.drafter = f"{str(algorithm or 'speculation').lower()} in SGLang {self.version}"
        self._sources: set[str] = set()

    def _info(self) -> dict[str, Any]:
        return self.client.maybe_json("/get_server_info", "/server_info")

    def _metrics(self) -> Metrics | None:
        try:
            return Metrics(parse_metrics(self.client.text("/metrics")), self.model)
        except ServerError:
            return None

    def read(self) -> Reading:
        found = self._metrics()
        if found is None or not found.has(self.VERIFICATIONS):
            return Reading(0, -1, 0, [])
        return Reading(round(found.total("sglang:num_requests")), round(found.total(self.VERIFICATIONS)), 0, [])

    def counts(self, answers: list[Served]) -> bool:
        return not all("spec_verify_ct" in answer.details for answer in answers)

    def settled(self, before: Reading, now: Reading, answers: list[Served]) -> bool:
        if not self.counts(answers) or now.drafts < 0:
            return True
        return now.finished - before.finished >= len(answers) and now.drafts > before.drafts

    def cycles(self, before: Reading, after: Reading, answers: list[Served]) -> list[Cycle]:
        committed = sum(answer.committed for answer in answers)
        if all(_histogram(answer) is not None for answer in answers):
            self._sources.add("the acceptance histogram of each answer")
            return [cycle for answer in answers for cycle in self._of_histogram(answer)]
        forwards, source = self._forwards(before, after, answers, committed)
        if all(answer.seen for answer in answers) and sum(len(answer.steps) - 1 for answer in answers) == forwards:
            self._sources.add(f"{source}, positions from the stream")
            return [cycle for answer in answers for cycle in cycles_of_steps(answer.steps[1:], self.depth)]
        self._sources.add(f"{source}; acceptance by position is not reported by this server")
        return cycles_without_positions(forwards, committed)

    def _of_histogram(self, answer: Served) -> list[Cycle]:
        forwards, reached = reached_of_histogram(_histogram(answer) or [], self.depth)
        return cycles_from_counts(forwards, reached, answer.committed, answer.steps[-1] if answer.seen else None)

    def _forwards(self, before: Reading, after: Reading, answers: list[Served], committed: int) -> tuple[int, str]:
        if not self.counts(answers):
            return sum(int(answer.details["spec_verify_ct"]) for answer in answers), "the verifications of each answer"
        if before.drafts >= 0 and after.drafts > before.drafts:
            return after.drafts - before.drafts, f"the counter {self.VERIFICATIONS}_total"
        found = self._metrics()
        mean = _mean_length(self._info())
        source = "the server's mean accept length since it started (avg_spec_accept_length)"
        if mean is None and found is not None:
            mean, source = found.mean("sglang:spec_accept_length"), "the gauge sglang:spec_accept_length (a window)"
        if not mean:
            raise ServerError(
                f"{self.client.url}: the server says nothing about acceptance: neither answers (return_meta_info) nor "
                "/get_server_info nor /metrics. Start it with --enable-metrics and speculation on."
            )
        return max(round(committed / mean), 1) if committed else 0, source

    def notes(self) -> list[str]:
        return [f"τ comes from {source}" for source in sorted(self._sources)]


def _histogram(answer: Served) -> list[int] | None:
    """Verifications by number of accepted drafts, under either of the names it has had."""
    found = answer.details.get("spec_correct_drafts_histogram") or answer.details.get("spec_accept_histogram")
    return [int(count) for count in found] if isinstance(found, list) and found else None


def _mean_length(info: dict[str, Any]) -> float | None:
    states = info.get("internal_states")
    values = (
        [s.get("avg_spec_accept_length") for s in states if isinstance(s, dict)] if isinstance(states, list) else []
    )
    known = [float(value) for value in values if value]
    return sum(known) / len(known) if known else None


ENGINES: dict[str, Callable[[Client, str], Vllm | Sglang]] = {"vllm": Vllm, "sglang": Sglang}
