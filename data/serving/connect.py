"""Reaches the servers of a recipe and refuses what they cannot do, before anything is asked of them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from headstart.data.chat.chat import ChatFormat
from headstart.data.chat.rendering import PROBE
from headstart.data.config import DistillConfig, ServerConfig
from headstart.data.distilling.answering import Request
from headstart.data.serving.engines import context_of, recognise, request_body, require_settings
from headstart.data.serving.http import Connection, Named, StatusError, model_entry
from headstart.data.serving.parity import require_same_prompt
from headstart.data.serving.pool import REFUSED, Server
from headstart.data.serving.reply import read_reply
from headstart.heads.errors import ConfigError, TemplateError
from headstart.heads.targets.target import Target
from headstart.heads.targets.template_date import shown_date


def connect(target: Target, config: DistillConfig, template_kwargs: Mapping[str, Any] | None = None) -> list[Server]:
    """Reach every server of the recipe, and refuse what it cannot do. It is asked one question of one token.

    Args: target: its weights are not needed.
    Raises: ConfigError for settings that a server cannot honour, for another model, and where the variable of an API
        key is not set; ServerError where a server cannot be reached, or renders prompts differently.
    """
    kwargs = dict(template_kwargs or {})
    return [
        _connected(target, config, kwargs, server, f"data.distill.servers[{number}]")
        for number, server in enumerate(config.servers)
    ]


def _connected(
    target: Target, config: DistillConfig, template_kwargs: dict[str, Any], given: ServerConfig, where: str
) -> Server:
    connection = Connection(given.url, _key(given, where), _named(given, where))
    entry = model_entry(connection, given.model)
    if given.model is None:
        _require_model(entry, target, connection.url, where)
    engine = recognise(connection, entry) if given.engine == "auto" else given.engine
    require_settings(engine, config, template_kwargs, where)
    room = context_of(entry, connection.url)
    if room is not None and config.max_new_tokens >= room:
        raise ConfigError(
            f"data.distill.max_new_tokens: found {config.max_new_tokens}, but {connection.url} takes {room} tokens "
            f"with the prompt (max_model_len): set it to less than {room}, or start the server with more"
        )
    server = Server(where, connection, str(entry["id"]), engine, given.concurrency)
    _ask_once(server, target, config, template_kwargs)
    return server


def _named(given: ServerConfig, where: str) -> Named:
    key = f"the environment variable {given.api_key_env}" if given.api_key_env else f"{where}.api_key_env"
    return Named(f"{where}.url", f"{where}.model", key)


def _key(given: ServerConfig, where: str) -> str | None:
    if given.api_key_env is None:
        return None
    key = os.environ.get(given.api_key_env)
    if not key:
        raise ConfigError(
            f"{where}.api_key_env: the environment variable {given.api_key_env} is not set, expected the API key of "
            f"{given.url}: export {given.api_key_env}=…"
        )
    return key


def _require_model(entry: dict[str, Any], target: Target, url: str, where: str) -> None:
    """Raises: ConfigError where the only model that is served has another name than the target."""
    wanted = target.config.name
    names = [name for name in (entry["id"], entry.get("root")) if isinstance(name, str)]
    if not any(_last(name) == _last(wanted) for name in names):
        raise ConfigError(
            f"{where}: {url} serves {entry['id']!r}, the recipe's target is {wanted!r}: answers of another model would "
            f"train the head badly. If it is the same model under another name, set {where}.model={entry['id']}"
        )


def _last(name: str) -> str:
    """The last part of a model's name or path, whatever its case: `HuggingFaceTB/SmolLM2` and `/models/smollm2`."""
    return name.rstrip("/").split("/")[-1].lower()


def _ask_once(server: Server, target: Target, config: DistillConfig, template_kwargs: dict[str, Any]) -> None:
    """One question with one token of answer: does the server take the fields, and render the prompt as training does?

    Raises: ConfigError where it refuses a field; ServerError as `require_same_prompt` does.
    """
    try:
        ids = ChatFormat(target.tokenizer, target.stop_token_ids, template_kwargs).prompt_ids(PROBE[:1])
    except TemplateError:
        return  # the template wants a system message or tools, which the prompts may have; or all are token ids
    request = Request("a test question", 0, tuple(ids), 1, PROBE[:1], (), template_kwargs)
    path, body = request_body(server.engine, server.model, request, config, target.stop_token_ids)
    where = server.url + path
    try:
        content = server.connection.post(path, {**body, "max_tokens": 1}, config.server_timeout)
        reply = read_reply(content, where, config.max_new_tokens, config.top_logprobs)
    except StatusError as error:
        if error.status not in REFUSED:
            raise
        asked = ", ".join(
            f"{name}={json.dumps(value)}" for name, value in body.items() if name not in ("model", "messages")
        )
        raise ConfigError(
            f"{error}. The server does not take a request of data.distill ({asked}); change what it names, or say what "
            f"the server is ({server.where}.engine)"
        ) from error
    require_same_prompt(server, request, reply, target.tokenizer)
    date = shown_date(target.tokenizer)
    if reply.prompt_ids is None:
        server.notes.append("prompts are compared by their number of tokens, since it does not return them")
        if date is not None:
            server.notes.append(
                f"whether its template shows the date {date} (target.template_date) cannot be seen: start it with a "
                "template in which the date is written out"
            )
