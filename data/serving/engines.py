"""What each kind of OpenAI-compatible server takes beyond OpenAI's fields, and the body of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from headstart.data.config import DistillConfig
from headstart.data.distilling.answering import Request
from headstart.data.records.messages import wire_message
from headstart.data.serving.checks import found
from headstart.data.serving.http import Connection
from headstart.heads.errors import ConfigError, ServerError

#: seeds are sent with so many bits: llama.cpp keeps 32, with a sign in some places
SEED_BITS = 31


@dataclass(frozen=True)
class Engine:
    """A kind of server.

    Attributes:
        title: its name for people.
        neutral: fields that switch off what it would otherwise take from the model's generation_config, or from
            defaults of its own.
        takes_top_k, takes_template_kwargs, takes_stop_ids: whether it has top_k, variables of the chat template, and a
            list of stop tokens.
        with_ids: fields by which it returns token ids; empty if it cannot.
        with_logprobs: fields by which log-probabilities name their tokens by id; None if it cannot.
        with_tools: fields of a request with tools.
    """

    title: str
    neutral: dict[str, Any] = field(default_factory=dict)
    takes_top_k: bool = False
    takes_template_kwargs: bool = False
    takes_stop_ids: bool = False
    with_ids: dict[str, Any] = field(default_factory=dict)
    with_logprobs: dict[str, Any] | None = None
    with_tools: dict[str, Any] = field(default_factory=dict)


#: every server: OpenAI's own fields
COMMON = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "n": 1, "stream": False}
TABLE = {
    "vllm": Engine(
        "vLLM",
        {"min_p": 0.0, "repetition_penalty": 1.0, "min_tokens": 0, "ignore_eos": False},
        takes_top_k=True,
        takes_template_kwargs=True,
        takes_stop_ids=True,
        with_ids={"return_token_ids": True},
        with_logprobs={"return_tokens_as_token_ids": True},
        with_tools={"tool_choice": "none"},  # otherwise it needs a parser of their calls
    ),
    "sglang": Engine(
        "SGLang",
        {"min_p": 0.0, "repetition_penalty": 1.0, "min_tokens": 0, "ignore_eos": False},
        takes_top_k=True,
        takes_template_kwargs=True,
        takes_stop_ids=True,
    ),
    "tgi": Engine("TGI"),
    "llama.cpp": Engine(
        "llama.cpp",
        {"min_p": 0.0, "typical_p": 1.0, "repeat_penalty": 1.0, "cache_prompt": True},
        takes_top_k=True,
        takes_template_kwargs=True,
        with_logprobs={},
    ),
    "openai": Engine("a server of OpenAI's interface"),
}
#: owner of a model in /v1/models → kind of server
OWNERS = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llama.cpp"}


def recognise(connection: Connection, model: dict[str, Any]) -> str:
    """The kind of a server: a key of TABLE. Args: model: its entry in /v1/models."""
    owner = model.get("owned_by")
    if isinstance(owner, str) and owner in OWNERS:
        return OWNERS[owner]
    try:
        info = connection.maybe_json("/info")
    except ServerError:  # some other page of that name
        info = {}
    return "tgi" if {"model_id", "max_concurrent_requests"} <= info.keys() else "openai"


def require_settings(engine: str, config: DistillConfig, template_kwargs: dict[str, Any], where: str) -> None:
    """Raises: ConfigError for a setting that this kind of server cannot honour. `where`: the server's recipe key."""
    kind = TABLE[engine]
    remedy = f"or answer in process (data.distill.servers=[]), or say what the server is ({where}.engine)"
    if config.top_k and not kind.takes_top_k:
        raise ConfigError(
            f"data.distill.top_k: found {config.top_k}, but {kind.title} ({where}) has no such field and would sample "
            f"among all tokens: set it to 0, {remedy}"
        )
    if template_kwargs and not kind.takes_template_kwargs:
        raise ConfigError(
            f"data.template_kwargs: found {', '.join(template_kwargs)}, but {kind.title} ({where}) passes none to the "
            f"chat template: unset them, {remedy}"
        )
    if config.top_logprobs and kind.with_logprobs is None:
        raise ConfigError(
            f"data.distill.top_logprobs: found {config.top_logprobs}, but {kind.title} ({where}) does not name the "
            f"tokens of its log-probabilities by id: set it to 0, {remedy}"
        )


def cannot_ask(engine: str, request: Request) -> str | None:
    """Why this kind of server cannot be asked this, or None."""
    kind = TABLE[engine]
    if not request.messages and not kind.with_ids:
        return f"the prompt is token ids alone, and {kind.title} does not return those of its answer"
    if request.template_kwargs and not kind.takes_template_kwargs:
        return f"chat_template_kwargs are given, and {kind.title} passes none to the chat template"
    return None


def request_body(
    engine: str, model: str, request: Request, config: DistillConfig, stop_token_ids: Sequence[int]
) -> tuple[str, dict[str, Any]]:
    """Path and body of a request. Everything that decides the answer is said, so that no default of a server counts."""
    kind = TABLE[engine]
    body: dict[str, Any] = {"model": model, **COMMON, **kind.neutral, "max_tokens": config.max_new_tokens}
    body |= {"temperature": config.temperature, "top_p": config.top_p}
    if config.temperature > 0:
        body["seed"] = request.seed & ((1 << SEED_BITS) - 1)
    if kind.takes_top_k:
        body["top_k"] = config.top_k or -1
    if kind.takes_stop_ids:
        body["stop_token_ids"] = list(stop_token_ids)
    body |= kind.with_ids
    if not request.messages:
        logprobs = {"logprobs": config.top_logprobs} if config.top_logprobs else {}
        more = (kind.with_logprobs or {}) if logprobs else {}
        return "/v1/completions", {**body, "prompt": list(request.prompt_ids), **logprobs, **more}
    if config.top_logprobs:
        body |= {"logprobs": True, "top_logprobs": config.top_logprobs, **(kind.with_logprobs or {})}
    body["messages"] = [wire_message(message) for message in request.messages]
    if request.tools:
        body |= {"tools": list(request.tools), **kind.with_tools}
    if request.template_kwargs:
        body["chat_template_kwargs"] = dict(request.template_kwargs)
    return "/v1/chat/completions", body


def context_of(model: dict[str, Any], where: str) -> int | None:
    """Most tokens of prompt and answer together, where the server says it. Raises: ServerError for a wrong value."""
    value = model.get("max_model_len")
    if value is None:
        return None
    if type(value) is not int or value < 1:
        raise ServerError(f"{where}: max_model_len: found {found(value)}, expected a number of tokens")
    return value
