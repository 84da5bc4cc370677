"""Contexts of a benchmark: the token ids before each answer, rendered by the target's chat template."""

from __future__ import annotations

from headstart.data.chat.rendering import RefusedError
from headstart.data.prompts import Chats, Prompt
from headstart.eval.config import EvalConfig
from headstart.eval.decoding.decode import Answer
from headstart.eval.measuring.conversations import Conversations
from headstart.heads.counting import counted
from headstart.heads.errors import DataError
from headstart.heads.targets.target import Target

#: most prompts that a note names
NAMED = 3


def chats_of(target: Target, config: EvalConfig) -> Chats:
    return Chats(target.tokenizer, target.stop_token_ids, dict(config.template_kwargs))


def first_contexts(
    prompts: list[Prompt], target: Target, config: EvalConfig
) -> tuple[list[Prompt], list[list[int]], list[str]]:
    """(prompts that the chat template renders, their first contexts, notes on the prompts that it refuses).

    Raises: DataError naming a prompt that is empty, leaves no room or holds ids of another tokenizer; and where the
        template refuses all prompts.
    """
    chats, positions = chats_of(target, config), target.positions
    taken, contexts, refused = [], [], dict[str, list[Prompt]]()
    for prompt in prompts:
        try:
            context = chats.prompt_ids(prompt)
        except RefusedError as error:
            refused.setdefault(error.reason, []).append(prompt)
            last_refusal = f"prompt {prompt.id} ({prompt.where}): {error}"
        else:
            _check(prompt, context, positions, target.dims.vocab_size)
            taken.append(prompt)
            contexts.append(context)
    if not taken:
        raise DataError(f"{last_refusal}, and no other prompt is left: give prompts that the chat template takes")
    return taken, contexts, [_refusal(reason, members) for reason, members in refused.items()]


def _check(prompt: Prompt, context: list[int], positions: int, vocab_size: int) -> None:
    if not context:
        raise DataError(f"prompt {prompt.id} ({prompt.where}): has no tokens: change it, or leave it out")
    if prompt.prompt_token_ids is not None and max(context) >= vocab_size:
        raise DataError(
            f"prompt {prompt.id}: prompt_token_ids: found {max(context)}, the target has {vocab_size} tokens: these "
            "ids are another tokenizer's"
        )
    if len(context) >= positions:
        raise DataError(
            f"prompt {prompt.id}: found {len(context)} tokens, the target has {positions} positions: shorten it, or "
            "leave it out"
        )


def _refusal(reason: str, prompts: list[Prompt]) -> str:
    names = ", ".join(prompt.id for prompt in prompts[:NAMED])
    more = f" and {len(prompts) - NAMED} more" if len(prompts) > NAMED else ""
    return f"dropped {counted(len(prompts), 'prompts')}: {reason} ({names}{more})"


class Contexts:
    """Contexts of every turn. A conversation ends early where the template refuses it or the positions are used up.

    Args: first: context of each prompt's first answer.
    """

    def __init__(self, target: Target, config: EvalConfig, conversations: Conversations, first: list[list[int]]):
        self.conversations, self.max_new_tokens = conversations, config.max_new_tokens
        self.positions, self.chats = target.positions, chats_of(target, config)
        self.first = {id(prompt): context for prompt, context in zip(conversations.prompts, first, strict=True)}

    def of(self, prompts: list[Prompt], turn: int) -> tuple[list[Prompt], list[list[int]]]:
        """The prompts whose question of this turn can be asked, and their contexts."""
        asked, contexts = [], []
        for prompt in prompts:
            context = self._context(prompt, turn)
            if context is not None:
                asked.append(prompt)
                contexts.append(context)
        return asked, contexts

    def _context(self, prompt: Prompt, turn: int) -> list[int] | None:
        if not turn:
            return self.first[id(prompt)]
        try:
            context = self.chats.prompt_ids(prompt, self.conversations.said[id(prompt)])
        except RefusedError as error:
            self.conversations.leave_out(prompt, error.reason)
            return None
        if len(context) < self.positions:
            return context
        reason = f"the target has {self.positions} positions, which their conversations fill"
        self.conversations.leave_out(prompt, reason)
        return None

    def answered(self, prompts: list[Prompt], turn: int, answers: list[Answer], limits: list[int]) -> None:
        """Add the answers to their conversations, which end where the template cannot read an answer as a message."""
        for prompt, answer, limit in zip(prompts, answers, limits, strict=True):
            self.conversations.cut += limit < self.max_new_tokens and answer.finish_reason == "length"
            if turn + 1 == prompt.answers:
                continue
            said = answer.tokens[:-1] if answer.finish_reason == "stop" else answer.tokens
            try:
                message = self.chats.of(prompt).answer_message(said)
            except RefusedError as error:
                self.conversations.end(prompt, error.reason)
            else:
                self.conversations.said[id(prompt)].append(message)

    def notes(self) -> list[str]:
        why_cut = f"the target has {self.positions} positions"
        return self.conversations.notes(self.max_new_tokens, why_cut, self.chats.notes)
