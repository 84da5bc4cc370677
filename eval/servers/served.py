"""Measure a running vLLM or SGLang server: τ and acceptance from its own counters, by the definition of methods §0.

    headstart eval --engine vllm --url http://localhost:8000 --data prompts.jsonl

Prompts go through the OpenAI-compatible API at temperature 0 and with every other setting of Headstart's loop,
`eval.batch_size` at a time; the server's metrics are read before and after every batch. Nothing else may use the server
meanwhile: its requests would be counted.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from headstart.data.messages import wire_message
from headstart.data.prompts import Prompt
from headstart.data.records import Message, unread_note
from headstart.eval.config import EvalConfig
from headstart.eval.decoding.decode import Cycle
from headstart.eval.decoding.sampling import Sampling
from headstart.eval.measuring.benchmark import Progress
from headstart.eval.measuring.metrics import RESAMPLES, Timed, acceptance, bootstrap_tau
from headstart.eval.measuring.report import Report, Section
from headstart.eval.prompts import batches, describe_data, load_prompts
from headstart.eval.servers.answers import Served
from headstart.eval.servers.api_client import Client, served_model
from headstart.eval.servers.probes import ENGINES, Reading, Sglang, Vllm
from headstart.heads.errors import ConfigError, ServerError
from headstart.heads.provenance import command_line, git_revision, versions

#: seconds until a server's counters hold the requests it has answered
SETTLE = 10.0
#: so many tokens without a single draft are no measurement of a draft head
MANY = 64


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
        model: served name (or the path it was loaded from); None where the server has one model only.
        key: API key of the server.
        head_info: about the head that it drafts with, for the report.
    Raises: ConfigError for settings, DataError for the prompts, ServerError for everything about the server.
    """
    if engine not in ENGINES:
        raise ConfigError(f"--engine: found {engine!r}, expected one of {sorted(ENGINES)}")
    if config.temperature != 0:
        raise ConfigError(
            f"eval.temperature: found {config.temperature:g}; a server is measured at temperature 0: its counters do "
            "not tell what sampling accepts by position in a way that compares"
        )
    if config.synthetic_acceptance is not None:
        raise ConfigError(
            f"eval.synthetic_acceptance: found {config.synthetic_acceptance!r}; a server's acceptance is its own: "
            "unset it, or measure in Headstart's loop (without --engine)"
        )
    for name in ("batch_sizes", "context_lengths", "generate_baseline"):
        if found := getattr(config, name):
            raise ConfigError(
                f"eval.{name}: found {found}; a server is measured at one eval.batch_size and by itself: unset it"
            )
    if config.data is None:
        raise ConfigError("eval.data is not set: give --data FILE.jsonl")
    asked = sampling(config) | ENGINES[engine].asks(config)
    prompts = load_prompts(config.data, config.limit, config.limit_per_task, config.max_turns, config.task_field)
    client = Client(url, key)
    name = served_model(client, model)
    probe = ENGINES[engine](client, name)
    measured = _Measurement(client, probe, {"model": name, **asked}, config)
    measured.run(prompts, progress)
    return _report(engine, probe, client.url, name, config, measured, len(prompts), head_info).published()


def sampling(config: EvalConfig) -> dict[str, Any]:
    """What every request asks for beside its prompt and limit: the loop's settings, which both engines spell alike.

    Fields that a request leaves out are taken from the model's generation_config by the server (vLLM, SGLang). A seed
    is not sent: nothing is drawn at temperature 0.
    """
    neutral = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "min_tokens": 0, "ignore_eos": False}
    return {"temperature": 0.0, "top_p": config.top_p, "min_p": config.min_p, **neutral}


def chat_fields(prompt: Prompt, answers: list[Message], config: EvalConfig, probe: Vllm | Sglang) -> dict[str, Any]:
    """What a chat request says about the prompt: the server renders it by the target's template.

    Answers are the server's own messages, as a client sends them back: its parsers take thoughts and tool calls out of
    the text.
    """
    fields: dict[str, Any] = {"messages": [wire_message(message) for message in prompt.messages(answers)]}
    if prompt.tools:
        # vLLM refuses tools without a parser for calls, unless it is not to look for any; they are rendered either way
        fields |= {"tools": list(prompt.tools)} | ({"tool_choice": "none"} if isinstance(probe, Vllm) else {})
    kwargs = {**config.template_kwargs, **prompt.template_kwargs}
    return fields | ({"chat_template_kwargs": kwargs} if kwargs else {})


@dataclass
class _Tally:
    """What a task has gathered: cycles by prompt (by batch where several were answered at once), and seconds."""

    prompts: set[int] = field(default_factory=set)
    cycles: dict[int, list[Cycle]] = field(default_factory=dict)
    prefill_s: float = 0.0
    decode_s: float = 0.0
    committed: int = 0
    #: seconds to the first token of every request, and each request's mean per later token
    timed: Timed = field(default_factory=Timed)


class _Measurement:
    """
    Args: asked: fields that every request has in common.
    """

    def __init__(self, client: Client, probe: Vllm | Sglang, asked: dict[str, Any], config: EvalConfig):
        self.client, self.probe, self.asked, self.config = client, probe, asked, config
        self.tallies: dict[str, _Tally] = {}
        #: answers that ended by length before the limit that was asked for
        self.cut = 0
        #: questions that were not asked, because the answer before them had no text to put into the history
        self.left_out = 0
        self.unread: Counter[str] = Counter()

    def run(self, prompts: list[Prompt], progress: Progress | None) -> None:
        said: dict[int, list[Message]] = {id(prompt): [] for prompt in prompts}
        self.unread = Counter(name for prompt in prompts for name in prompt.unread)
        total, done = sum(prompt.answers for prompt in prompts), 0
        if self.config.warmup_tokens > 0:
            self._warm_up(prompts[0])
        for number, (task, _, batch) in enumerate(batches(prompts, self.config.batch_size)):
            if progress is not None:
                progress(done, total, task)
            done += len(batch)
            asked = [prompt for prompt in batch if all(message["content"] for message in said[id(prompt)])]
            self.left_out += len(batch) - len(asked)
            if not asked:
                continue
            answers, grown = self._ask([self._request(prompt, said[id(prompt)]) for prompt in asked])
            self._book(task, asked, number, grown, answers)
            for prompt, answer in zip(asked, answers, strict=True):
                said[id(prompt)].append({"role": "assistant", "content": answer.text})
        self._check_drafts()
        if progress is not None:
            progress(total, total, "done")

    def _request(self, prompt: Prompt, answers: list[Message], tokens: int | None = None) -> tuple[str, dict[str, Any]]:
        limit = self.config.max_new_tokens if tokens is None else tokens
        body = {**self.asked, "max_tokens": limit}
        if prompt.prompt_token_ids is not None and not answers:
            return "/v1/completions", {**body, "prompt": list(prompt.prompt_token_ids)}
        return "/v1/chat/completions", {**body, **chat_fields(prompt, answers, self.config, self.probe)}

    def _warm_up(self, prompt: Prompt) -> None:
        self._ask([self._request(prompt, [], self.config.warmup_tokens)])

    def _ask(self, requests: list[tuple[str, dict[str, Any]]]) -> tuple[list[Served], Reading]:
        """Answers, and what the counters grew by: a server books a step after it has sent its tokens."""
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
        if self.probe.counts(answers) and grown.finished > len(answers):
            raise ServerError(
                f"{self.client.url}: finished {grown.finished} requests while {len(answers)} were sent: somebody else "
                "uses the server, and their acceptance would be counted. Measure when it is idle."
            )
        return answers, grown

    def _check_drafts(self) -> None:
        """Raises: ServerError where the server drafted nothing at all."""
        committed = sum(tally.committed for tally in self.tallies.values())
        if committed >= MANY and not self.probe.verified:
            raise ServerError(
                f"{self.client.url}: the server generated {committed} tokens and says that it drafted none: its "
                "counters stand still, or speculation is switched off for these requests. Check its settings and log"
            )

    def _book(self, task: str, batch: list[Prompt], number: int, grown: Reading, answers: list[Served]) -> None:
        tally = self.tallies.setdefault(task, _Tally())
        try:
            cycles = self.probe.cycles(grown, answers)
            _check_tau(cycles, self.probe.most)
        except ValueError as error:
            raise ServerError(f"{self.client.url}: {error}; does somebody else use the server?") from error
        self.cut += sum(answer.finish == "length" and answer.tokens < answer.limit for answer in answers)
        unit = id(batch[0]) if self.config.batch_size == 1 else number
        tally.cycles.setdefault(unit, []).extend(cycles)
        tally.prompts |= {id(prompt) for prompt in batch}
        tally.committed += sum(answer.committed for answer in answers)
        for answer in answers:
            tally.timed.first_s.append(answer.first - answer.sent)
            if answer.committed:
                tally.timed.token_s.append((answer.last - answer.first) / answer.committed)
        began = min(answer.first for answer in answers)
        tally.prefill_s += began - min(answer.sent for answer in answers)
        tally.decode_s += max(answer.last for answer in answers) - began


def _check_tau(cycles: list[Cycle], most: int | None) -> None:
    """Raises: ValueError where more tokens were committed per forward than the deepest draft and one."""
    tau = acceptance(cycles).tau
    if most is not None and tau > most:
        raise ValueError(f"found {tau:.2f} tokens per forward, expected {most} at most (draft depth + 1)")


def _section(tallies: list[_Tally], config: EvalConfig) -> Section:
    units = [cycles for tally in tallies for cycles in tally.cycles.values()]
    found = acceptance(cycle for cycles in units for cycle in cycles)
    interval = bootstrap_tau(units, RESAMPLES, config.seed)
    committed, decode_s = sum(tally.committed for tally in tallies), sum(tally.decode_s for tally in tallies)
    return Section(
        prompts=sum(len(tally.prompts) for tally in tallies),
        forwards=found.forwards,
        tokens=found.tokens,
        tau=found.tau,
        tau_ci95=None if interval is None else list(interval),
        per_position_acceptance=found.per_position,
        per_position_conditional=found.per_position_conditional,
        tokens_per_s=committed / decode_s if committed and decode_s else None,
        baseline_tokens_per_s=None,
        speedup=None,
        latency={"baseline": None, "speculative": Timed.sum(tally.timed for tally in tallies).latency()},
    )


def _report(
    engine: str,
    probe: Vllm | Sglang,
    url: str,
    model: str,
    config: EvalConfig,
    measured: _Measurement,
    prompts: int,
    head_info: dict[str, Any] | None,
) -> Report:
    tallies = measured.tallies
    total = _section(list(tallies.values()), config)
    notes = [
        f"measured on a running server, {url}: tokens/s are the client's, without prefill; no speed-up without a "
        "second server that does not speculate",
        "latency per token is each request's mean",
        *probe.notes(),
    ]
    if measured.cut:
        notes.append(
            f"{measured.cut} answers ended by length before eval.max_new_tokens={config.max_new_tokens}: the server "
            "has a limit of its own (its context length, or max_new_tokens of its generation_config)"
        )
    if measured.left_out:
        notes.append(f"{measured.left_out} later turns were left out: the answer before them had no text")
    if unread := unread_note(measured.unread):
        notes.append(unread)
    if config.batch_size > 1:
        notes.append("several requests at once: acceptance by position includes what lies beyond a request's limit")
    return Report(
        target={"name": model},
        head=head_info,
        drafter=probe.drafter,
        data=describe_data(config.data),
        dtype="the server's dtype",
        device=url,
        temperature=0.0,
        lossless=True,
        tree=dict(probe.tree),
        batch_size=config.batch_size,
        max_new_tokens=config.max_new_tokens,
        prompts=prompts,
        **total.headline(),
        tasks={task: _section([tally], config) for task, tally in tallies.items()},
        greedy_identity=None,
        timing={
            "prefill_s": sum(tally.prefill_s for tally in tallies.values()),
            "decode_s": sum(tally.decode_s for tally in tallies.values()),
            "baseline_prefill_s": None,
            "baseline_decode_s": None,
        },
        sampling={**asdict(Sampling.from_config(config)), "acceptance": config.acceptance, "seed": config.seed},
        recipe={},
        versions={**versions(), engine: probe.version},
        git_revision=git_revision(),
        notes=notes,
        engine={"name": engine, "version": probe.version, "url": url, "model": model, "request": measured.asked},
        command=command_line(),
    )
