"""Measures a running vLLM or SGLang server: its own counters give τ and acceptance as methods §0 defines them.

    headstart eval --engine vllm --url http://localhost:8000 --data prompts.jsonl

Prompts are sent through the OpenAI-compatible API, `eval.batch_size` at a time, at temperature 0 and otherwise with the
settings of Headstart's loop. The server's metrics are read before and after every batch. Nobody else may use the server
meanwhile: their requests would be counted as well.
"""

from __future__ import annotations

import time
from typing import Any

from headstart.data.features import Progress
from headstart.data.prompts import Prompt
from headstart.data.records.media import dropped_lines
from headstart.data.records.messages import Message, wire_message
from headstart.data.serving.http import served_model
from headstart.eval.config import EvalConfig
from headstart.eval.decoding.decode import Cycle
from headstart.eval.measuring.conversations import Asked, Conversations
from headstart.eval.measuring.metrics import acceptance
from headstart.eval.measuring.report import Report
from headstart.eval.measuring.task_results import TaskResults, report_of
from headstart.eval.prompts import eval_prompts
from headstart.eval.servers.answers import Served
from headstart.eval.servers.api_client import Client
from headstart.eval.servers.probes import ENGINES, Reading, Sglang, Vllm
from headstart.heads.errors import ConfigError, ServerError
from headstart.heads.provenance import versions

#: most seconds until a server's counters hold the requests that it has answered
SETTLE = 10.0
#: a server that has answered with so many tokens and drafted none does not speculate
ENOUGH_TOKENS = 64


def evaluate_server(
    engine: str,
    url: str,
    config: EvalConfig,
    model: str | None = None,
    key: str | None = None,
    head_info: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> Report:
    """Evaluate the speculation of a running server on `config.data`.

    Args:
        engine: vllm or sglang.
        model: served name, or the path that it was loaded from; None where the server has one model only.
        key: API key of the server.
        head_info: what the report says about the head that the server drafts with.
    Raises: ConfigError for settings, DataError for the prompts, ServerError for everything about the server.
    """
    if engine not in ENGINES:
        raise ConfigError(f"--engine: found {engine!r}, expected one of {sorted(ENGINES)}")
    if config.temperature != 0:
        raise ConfigError(
            f"eval.temperature: found {config.temperature:g}; a server is measured at temperature 0, since its "
            "acceptance by position cannot be compared when it samples: set it to 0"
        )
    if config.synthetic_acceptance is not None:
        raise ConfigError(
            f"eval.synthetic_acceptance: found {config.synthetic_acceptance!r}; a server's acceptance is its own: "
            "unset it, or measure in Headstart's loop (without --engine)"
        )
    if config.scheduler:
        raise ConfigError(
            "eval.scheduler: found true, expected false with --engine: a server has a scheduler of its own. Set it to "
            "false, or measure in Headstart's loop (without --engine)"
        )
    for name in ("batch_sizes", "context_lengths", "generate_baseline"):
        if value := getattr(config, name):
            raise ConfigError(
                f"eval.{name}: found {value}; a server is measured at one eval.batch_size and nothing else is: unset it"
            )
    options = sampling(config) | ENGINES[engine].request_fields(config)
    prompts = eval_prompts(config)
    client = Client(url, key)
    name = served_model(client, model)
    probe = ENGINES[engine](client, name)
    conversations = Conversations(prompts, progress)
    request = {"model": name, **options}
    measured = _Measurement(client, probe, request, config, conversations)
    measured.run()
    return report_of(
        config,
        measured.tasks,
        target={"name": name},
        head=head_info,
        drafter=probe.drafter,
        dtype="the server's dtype",
        device=client.url,
        tree=dict(probe.tree),
        notes=[*_notes(client.url, config, measured), *dropped_lines(prompts.dropped, places_too=False)],
        versions={**versions(), engine: probe.version},
        engine={"name": engine, "version": probe.version, "url": client.url, "model": name, "request": request},
    ).published()


def sampling(config: EvalConfig) -> dict[str, Any]:
    """Fields of every request that vLLM and SGLang spell alike: the settings of Headstart's loop.

    The server would take a missing field from the model's generation_config. There is no seed: nothing is drawn at
    temperature 0.
    """
    neutral = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "min_tokens": 0, "ignore_eos": False}
    return {"temperature": 0.0, "top_p": config.top_p, "min_p": config.min_p, **neutral}


def chat_fields(prompt: Prompt, answers: list[Message], config: EvalConfig, probe: Vllm | Sglang) -> dict[str, Any]:
    """Fields of a chat request for the prompt, which the server renders by the target's template.

    Args: answers: earlier ones as the server gave them: its parsers have taken thoughts and tool calls out of the text.
    """
    fields: dict[str, Any] = {"messages": [wire_message(message) for message in prompt.messages(answers)]}
    if prompt.tools:
        fields |= {"tools": list(prompt.tools), **probe.with_tools}
    kwargs = {**config.template_kwargs, **prompt.template_kwargs}
    return fields | ({"chat_template_kwargs": kwargs} if kwargs else {})


class _Measurement:
    """One evaluation: every prompt answered by the server, whose counters are read before and after each batch.

    Args: request: fields that all requests have in common.
    """

    def __init__(
        self,
        client: Client,
        probe: Vllm | Sglang,
        request: dict[str, Any],
        config: EvalConfig,
        conversations: Conversations,
    ):
        self.client, self.probe, self.request, self.config = client, probe, request, config
        self.conversations = conversations
        self.tasks: dict[str, TaskResults] = {}

    def run(self) -> None:
        said = self.conversations.said
        if self.config.warmup_tokens > 0:
            self._ask([self._request(self.conversations.prompts[0], self.config.warmup_tokens)])
        for asked in self.conversations.batches(self.config.batch_size):
            answers, grown = self._ask([self._request(prompt, self.config.max_new_tokens) for prompt in asked.prompts])
            self._book(asked, grown, answers)
            for prompt, answer in zip(asked.prompts, answers, strict=True):
                said[id(prompt)].append({"role": "assistant", "content": answer.text})
                if not answer.text:
                    self.conversations.end(prompt, "the answer before them had no text")
        self._check_drafts()
        self.conversations.finish()

    def _request(self, prompt: Prompt, limit: int) -> tuple[str, dict[str, Any]]:
        answers, body = self.conversations.said[id(prompt)], {**self.request, "max_tokens": limit}
        if prompt.prompt_token_ids is not None and not answers:
            return "/v1/completions", {**body, "prompt": list(prompt.prompt_token_ids)}
        return "/v1/chat/completions", {**body, **chat_fields(prompt, answers, self.config, self.probe)}

    def _ask(self, requests: list[tuple[str, dict[str, Any]]]) -> tuple[list[Served], Reading]:
        """Answers, and what the counters grew by. A server counts a forward only after it has sent its tokens."""
        before = self.probe.read()
        answers = self.client.generate(requests)
        give_up = time.monotonic() + SETTLE
        while True:
            grown = self.probe.read().since(before, self.client.url)
            if self.probe.settled(grown, answers):
                break
            if time.monotonic() > give_up:
                raise ServerError(
                    f"{self.client.url}/metrics: counted {grown.finished} finished requests {SETTLE:g} s after "
                    f"{len(answers)} were answered; is a proxy or a second server in between?"
                )
            time.sleep(0.02)
        if self.probe.needs_counters(answers) and grown.finished > len(answers):
            raise ServerError(
                f"{self.client.url}: finished {grown.finished} requests while {len(answers)} were sent: somebody else "
                "uses the server, and their acceptance would be counted. Measure when it is idle."
            )
        return answers, grown

    def _check_drafts(self) -> None:
        """Raises: ServerError where the server drafted nothing at all."""
        committed = sum(results.speculative.tokens for results in self.tasks.values())
        if committed >= ENOUGH_TOKENS and not self.probe.verified:
            raise ServerError(
                f"{self.client.url}: the server generated {committed} tokens and says that it drafted none: its "
                "counters stand still, or speculation is switched off for these requests. Check its settings and log"
            )

    def _book(self, asked: Asked, grown: Reading, answers: list[Served]) -> None:
        try:
            cycles = self.probe.cycles(grown, answers)
            _check_tau(cycles, self.probe.most)
        except ValueError as error:
            raise ServerError(f"{self.client.url}: {error}; does somebody else use the server?") from error
        self.conversations.cut += sum(answer.finish == "length" and answer.tokens < answer.limit for answer in answers)
        results = self.tasks.setdefault(asked.task, TaskResults())
        # the counters give the cycles of a batch, not those of each prompt
        unit = id(asked.prompts[0]) if self.config.batch_size == 1 else asked.number
        results.cycles.setdefault(unit, []).extend(cycles)
        results.prompts |= {id(prompt) for prompt in asked.prompts}
        timed = results.speculative
        timed.tokens += sum(answer.committed for answer in answers)
        for answer in answers:
            timed.first_s.append(answer.first - answer.sent)
            if answer.committed:
                timed.token_s.append((answer.last - answer.first) / answer.committed)
        began = min(answer.first for answer in answers)
        timed.prefill_s += began - min(answer.sent for answer in answers)
        timed.decode_s += max(answer.last for answer in answers) - began


def _check_tau(cycles: list[Cycle], most: int | None) -> None:
    """Raises ValueError where τ is more than `most`, the draft depth + 1."""
    tau = acceptance(cycles).tau
    if most is not None and tau > most:
        raise ValueError(f"found {tau:.2f} tokens per forward, expected {most} at most (draft depth + 1)")


def _notes(url: str, config: EvalConfig, measured: _Measurement) -> list[str]:
    why_cut = "the server has a limit of its own (its context length, or max_new_tokens of its generation_config)"
    notes = [
        f"measured on a running server, {url}: tokens/s are the client's, without prefill; no speed-up without a "
        "second server that does not speculate",
        "latency per token is each request's mean",
        *measured.probe.notes(),
        *measured.conversations.notes(config.max_new_tokens, why_cut, []),
    ]
    if config.batch_size > 1:
        notes.append("several requests at once: acceptance by position includes what lies beyond a request's limit")
    return notes
