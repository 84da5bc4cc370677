"""Whether a server renders a prompt to the same tokens as training does; if not, why, as far as it can be told."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from headstart.data.distilling.answering import Request
from headstart.data.serving.checks import one_line, parsed
from headstart.data.serving.http import TIMEOUT
from headstart.data.serving.pool import Server
from headstart.data.serving.reply import Reply
from headstart.heads.errors import ServerError
from headstart.heads.targets.template_date import shown_date

#: tokens shown on either side of the first difference
AROUND = 8
SAME_TEMPLATE = (
    "start the server with the target's own template (vLLM, SGLang: --chat-template FILE; llama.cpp: --jinja "
    "--chat-template-file FILE), or give the recipe the server's (target.chat_template=FILE.jinja)"
)


def require_same_prompt(server: Server, request: Request, reply: Reply, tokenizer: Any) -> None:
    """Raises: ServerError naming both counts, the first difference where it is known, the likely cause, the remedy."""
    ours = list(request.prompt_ids)
    theirs = None if reply.prompt_ids is None else list(reply.prompt_ids)
    if theirs == ours and reply.prompt_tokens == len(ours):
        return
    if theirs is None and reply.prompt_tokens == len(ours):
        return
    if theirs is None or theirs == ours:
        theirs = _tokenized(server, request) if theirs is None else None
    cause, remedy = _cause(ours, theirs, reply.prompt_tokens, request, tokenizer)
    where = "" if theirs is None else f" ({_difference(ours, theirs, tokenizer)})"
    raise ServerError(
        f"{server.url}: {request.id}, answer {request.turn + 1}: the server's prompt has {reply.prompt_tokens} tokens, "
        f"Headstart renders {len(ours)}{where}: answers to it would train in a context in which they are not served. "
        f"Likely cause: {cause}. Remedy: {remedy}"
    )


def _tokenized(server: Server, request: Request) -> list[int] | None:
    """The prompt's token ids by the server's /tokenize (vLLM's), or None where it has none of that form."""
    if server.engine not in ("vllm", "openai") or not request.messages:
        return None
    body: dict[str, Any] = {"model": server.model, "messages": list(request.messages), "add_generation_prompt": True}
    if request.tools:
        body["tools"] = list(request.tools)
    if request.template_kwargs:
        body["chat_template_kwargs"] = dict(request.template_kwargs)
    with suppress(ServerError):
        said = parsed(server.connection.post("/tokenize", body, TIMEOUT), "/tokenize")
        tokens = said.get("tokens") if isinstance(said, dict) else None
        if isinstance(tokens, list) and all(type(token) is int and token >= 0 for token in tokens):
            return tokens
    return None


def _difference(ours: Sequence[int], theirs: Sequence[int], tokenizer: Any) -> str:
    first = len(os.path.commonprefix([list(ours), list(theirs)]))
    mine, others = (one_line(repr(tokenizer.decode(ids[first : first + AROUND])), 80) for ids in (ours, theirs))
    return f"they differ from token {first} on: there {others}, here {mine}"


def _cause(
    ours: Sequence[int], theirs: Sequence[int] | None, count: int, request: Request, tokenizer: Any
) -> tuple[str, str]:
    """The likely cause of a difference, and its remedy."""
    bos = getattr(tokenizer, "bos_token_id", None)
    more = theirs is not None and bos is not None and list(theirs[:1]) == [bos] and list(theirs[1:]) == list(ours)
    less = theirs is not None and bos is not None and list(ours[:1]) == [bos] and list(theirs) == list(ours[1:])
    begins = theirs is None and bos is not None
    if more or (begins and count == len(ours) + 1):
        twice = list(ours[:1]) == [bos]
        cause = (
            f"the server adds a token at the beginning (BOS{', which the template writes already' if twice else ''})"
        )
        return cause, "switch that off in the server, or use a template that agrees with it: " + SAME_TEMPLATE
    if less or (begins and count == len(ours) - 1 and list(ours[:1]) == [bos]):
        return "the server's prompt lacks the token at the beginning (BOS)", SAME_TEMPLATE
    date = shown_date(tokenizer)
    if date is not None and _near_date(ours, theirs, tokenizer, date):
        return (
            f"the template shows the date, here {date} (target.template_date)",
            "set target.template_date to the day that the server shows, give the date as a variable where the template "
            "takes one (data.template_kwargs={date_string: …}), or start the server with a template in which it is "
            "written out; a server that shows today's date gives other prompts tomorrow",
        )
    if request.template_kwargs:
        given = ", ".join(request.template_kwargs)
        return (
            f"the server passes the variables {given} (data.template_kwargs, chat_template_kwargs) not to the "
            "template, or has another template",
            f"use a server that takes chat_template_kwargs (vLLM, SGLang, llama.cpp), and {SAME_TEMPLATE}",
        )
    if request.tools:
        return (
            "the server writes the tools differently, or leaves them out",
            f"see its settings for tools, and {SAME_TEMPLATE}",
        )
    return "the server has another chat template or another tokenizer, or cuts prompts", SAME_TEMPLATE


def _near_date(ours: Sequence[int], theirs: Sequence[int] | None, tokenizer: Any, date: str) -> bool:
    """Whether the first difference is within or right before the year that the template shows."""
    if theirs is None:
        return True
    first = len(os.path.commonprefix([list(ours), list(theirs)]))
    around = tokenizer.decode(list(ours[max(first - AROUND, 0) : first + AROUND]))
    return date[:4] in around
