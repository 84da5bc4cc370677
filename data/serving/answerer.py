"""Distillation through OpenAI-compatible servers: requests go to several servers, their answers become tokens.

The server renders the prompt. Every answer says how many tokens its prompt had there, or which; they must be those
that Headstart renders (`parity.py`). The tokens of an answer are the server's own where it returns them. Otherwise its
message is rendered by the target's template behind its prompt, and tokenised in that place.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from headstart.data.chat.rendering import RefusedError
from headstart.data.config import DistillConfig
from headstart.data.distilling.answering import Answer, Answerer, Request, Requests
from headstart.data.features import Progress
from headstart.data.prompts import Chats, Prompt
from headstart.data.records.conversation import FINISH
from headstart.data.records.messages import Message
from headstart.data.serving.engines import cannot_ask, request_body
from headstart.data.serving.found import REQUEST_HASH, adopt
from headstart.data.serving.parity import require_same_prompt
from headstart.data.serving.pool import Asked, Patience, Pool, Server
from headstart.data.serving.reply import Reply
from headstart.heads.errors import ServerError, TemplateError
from headstart.heads.targets.target import Target

#: what stands in a text for the bytes of a character that is not whole
HALF = "\ufffd"


class ServerAnswerer(Answerer):
    """Answers requests through servers.

    A record's turn gets `request` (the request's hash), `finish_reason` as the server said it, `token_ids_from`
    (server or text), `server_tokens` where the server counted another number of tokens than its text has, and
    `top_logprobs` where they are asked for.

    Args:
        servers: of `connect`.
        say: gets a line when a server is set aside, and when it answers again.
    Attributes:
        by_text: answers whose tokens come from their text.
        recounted: those among them of which the server counted another number of tokens.
    """

    def __init__(
        self,
        target: Target,
        config: DistillConfig,
        servers: Sequence[Server],
        say: Callable[[str], None] = lambda line: None,
        patience: Patience | None = None,
    ):
        self.target, self.config, self.servers, self.say = target, config, list(servers), say
        self.patience = patience or Patience(
            config.server_timeout, config.server_tries, give_up_s=config.server_patience
        )
        self.by_text = self.recounted = 0
        self._chats = Chats(target.tokenizer, target.stop_token_ids)

    @property
    def decides(self) -> Mapping[str, Any]:
        """The servers' precision and kernels are not known, so their answers do not continue those made in process.

        More samples per prompt keep those that are there: the hashes of requests tell samples apart.
        """
        logprobs = {"top_logprobs": self.config.top_logprobs} if self.config.top_logprobs else {}
        target = self.target.config
        name = target.name if target.revision is None else f"{target.name}@{target.revision}"
        return {"weights": None, "dtype": None, "samples": None, "answered_by": f"servers of {name}", **logprobs}

    def adopt(self, out: Path, first: Sequence[tuple[Request, Prompt]], progress: Progress) -> None:
        """See found.adopt."""
        asked: dict[str, list[tuple[str, Prompt]]] = {}
        for request, prompt in first:
            asked.setdefault(request_hash(self.target, self.config, request), []).append((request.id, prompt))
        adopt(out, asked, progress)

    def answers(self, requests: Requests) -> Iterator[Answer]:
        with Pool(self.servers, self.patience, self.say) as pool:
            while True:
                for request in requests.take(pool.room):
                    pool.submit(self._asked(request))
                if not pool.open:
                    break
                outcome = pool.next()
                if outcome.reply is None or outcome.server is None:
                    yield Answer(outcome.tag, failed=outcome.failed)
                else:
                    yield self._answer(outcome.tag, outcome.reply, outcome.server)
        if self.recounted:
            self.say(
                f"{self.recounted} of {self.by_text} answers whose tokens come from their text have another number of "
                "tokens than the server generated: their text can be tokenised in several ways (`server_tokens`)"
            )

    def _asked(self, request: Request) -> Asked:
        def build(server: Server) -> tuple[str, dict[str, Any]] | str:
            if (why := cannot_ask(server.engine, request)) is not None:
                return why
            return request_body(server.engine, server.model, request, self.config, self.target.stop_token_ids)

        return Asked(request, build, self.config.max_new_tokens, self.config.top_logprobs)

    def _answer(self, request: Request, reply: Reply, server: Server) -> Answer:
        """Raises: ServerError where the server rendered the first question of a conversation differently. Another
        rendering of a later one ends the conversation: its history holds what the server's parsers made of answers."""
        try:
            require_same_prompt(server, request, reply, self.target.tokenizer)
        except ServerError as error:
            if request.turn == 0:
                raise
            return Answer(request, failed=str(error), for_good=True)
        try:
            ids, finish, source = self._tokens(request, reply)
        except TemplateError as error:
            return Answer(request, failed=f"{server.url}: {error}", for_good=True)
        more: dict[str, Any] = {REQUEST_HASH: request_hash(self.target, self.config, request)}
        # what a record says is read by `FINISH`; a cut answer is no whole one whatever the server called it
        more["finish_reason"] = reply.finish if FINISH[reply.finish] == finish else finish
        more["token_ids_from"] = source
        if source == "text":
            self.by_text += 1
            if reply.completion_tokens not in (None, len(ids)):
                self.recounted += 1
                more["server_tokens"] = reply.completion_tokens
        if reply.logprobs is not None:
            more["top_logprobs"] = {name: rows[: len(ids)] for name, rows in reply.logprobs.items()}
        own = reply.plain and source == "server"  # what the tokens say is read as from answers made in process
        return Answer(request, ids, finish, None if own else reply.message, more=more)

    def _tokens(self, request: Request, reply: Reply) -> tuple[tuple[int, ...], str, str]:
        """Token ids of an answer, "stop" or "length", and where they come from, "server" or "text".

        Raises: TemplateError saying why there are none.
        """
        if reply.finish not in FINISH:
            raise RefusedError(
                f"the server ended an answer with finish_reason {reply.finish!r}, expected one of {', '.join(FINISH)}"
            )
        ids, stops, ended = reply.token_ids or (), self.target.stop_token_ids, FINISH[reply.finish] == "stop"
        vocabulary = self.target.dims.vocab_size
        if ids and max(ids) >= vocabulary:
            raise RefusedError(f"an answer holds token id {max(ids)}, the target has {vocabulary}: another model's")
        if ids and (ids[-1] in stops or not ended):
            return ids, "stop" if ids[-1] in stops else "length", "server"
        if not request.messages:
            raise RefusedError("the prompt is token ids alone, and the server does not return those of its answer")
        return (
            self._from_text(request, reply.message, "stop" if ended else "length"),
            "stop" if ended else "length",
            "text",
        )

    def _from_text(self, request: Request, message: Message, finish: str) -> tuple[int, ...]:
        """The message's tokens behind its prompt, as the template writes it there.

        A text that was cut within a character ends with a mark of replacement, which nobody generated.
        """
        if finish == "length":
            message = {**message, "content": message["content"].rstrip(HALF)}
        encoded = self._chats.of(request).encode([*request.messages, message], finish, "last", request.tools)[-1]
        begin = len(request.prompt_ids)
        if tuple(encoded.token_ids[:begin]) != request.prompt_ids:
            raise RefusedError("the template renders the answer's text not behind its prompt")
        last = max((place for place, turn in enumerate(encoded.turn_ids) if turn >= 0), default=-1)
        ids = tuple(encoded.token_ids[begin : last + 1])
        if not ids:
            raise RefusedError("the answer is empty")
        if finish == "stop" and ids[-1] not in self.target.stop_token_ids:
            raise RefusedError("the template writes no stop token after an answer, and the server returns no token ids")
        return ids


def request_hash(target: Target, config: DistillConfig, request: Request) -> str:
    """What identifies a request: model, chat, tools, template variables, sampling, and where it is drawn its seed,
    which differs from sample to sample."""
    asked: dict[str, Any] = {"model": target.config.name, "revision": target.config.revision}
    asked |= {"messages": list(request.messages), "tools": list(request.tools)}
    asked |= {"template_kwargs": dict(request.template_kwargs), "prompt": list(request.prompt_ids)}
    asked |= {"max_tokens": config.max_new_tokens, "temperature": config.temperature}
    if config.temperature > 0:
        asked |= {"top_p": config.top_p, "top_k": config.top_k, "seed": request.seed}
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:24]
