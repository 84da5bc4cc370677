"""Answers behind prompts that are not the beginning of the text with the answer.

A server answers the prompt, so the text that trains is the prompt, followed by what the model says. Three kinds of
templates write the prompt in another way once it is answered:

- the prompt begins the model's thoughts (DeepSeek-R1) or closes empty ones, and the template writes no thoughts into a
  history. The model then says the rest of the thoughts, their end, and the answer as the history has it;
- the same words stand behind the last message, answered or not (Command R: an instruction about tools);
- an earlier part of the prompt moves (Mistral: the system message stands in the last message only).

Whatever is put together here is first compared with what the template itself writes; otherwise the answer is refused.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headstart.data.chat.rendering import PROBE, RefusedError, Renderer, UnmaskableError
from headstart.data.records.messages import Message

#: marks before and behind the model's thoughts
MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|channel>thought\n", "<channel|>"),  # Gemma 4
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A and R7B
)
#: (where the answer begins, the text, where its supervised part ends)
Behind = tuple[int, str, int]


@dataclass(frozen=True)
class _Begun:
    """Thoughts that a prompt begins, or has closed with nothing in them.

    Attributes:
        at: where they begin in the prompt.
        gap: white space behind the mark.
        opening, closing: the marks.
    """

    at: int
    gap: str
    closed: bool
    opening: str
    closing: str


def _begun(prompt: str) -> _Begun | None:
    """The thoughts that stand at the end of the prompt, if any do."""
    for opening, closing in MARKS:
        at = prompt.rfind(opening)
        inside = prompt[at + len(opening) :]
        if at >= 0 and inside.strip() in ("", closing):
            return _Begun(at, inside[: len(inside) - len(inside.lstrip())], bool(inside.strip()), opening, closing)
    return None


def no_beginning(prompt: str, text: str, index: int, because: str = "") -> tuple[str, str]:
    """Reason and detail of the refusal of message `index`."""
    apart = "the prompt before an answer is not the beginning of the text with the answer"
    return f"chat template: {because or apart}", (
        f"{': ' + apart if because else ''} (message {index}), so it would train in another context than it is "
        f"served in: the prompt ends {prompt[-60:]!r}, "
        f"the text there is {text[max(len(prompt) - 60, 0) : len(prompt) + 20]!r}. "
        "Set data.template_kwargs (such as {enable_thinking: false}), give a template whose answers begin as its "
        "prompts end (target.chat_template=FILE.jinja), or train on distilled answers (they carry token ids)"
    )


def answer_behind_prompt(
    renderer: Renderer, messages: Sequence[Message], index: int, tools: Sequence[dict[str, Any]]
) -> Behind | None:
    """The prompt before assistant message `index`, followed by the answer; None if the template is of no known kind.

    Raises: RefusedError when the template refuses the messages; UnmaskableError for an answer without thoughts behind
        a prompt that begins some, and for one with thoughts behind a prompt that closes them.
    """
    prompt = renderer.render(messages[:index], True, tools)[0]
    if begun := _begun(prompt):
        return _thinking(renderer, messages, index, tools, prompt, begun)
    return _before_foot(renderer, messages, index, tools, prompt) or _moved(renderer, messages, index, tools, prompt)


def _thinking(
    renderer: Renderer,
    messages: Sequence[Message],
    index: int,
    tools: Sequence[dict[str, Any]],
    prompt: str,
    begun: _Begun,
) -> Behind | None:
    """Thoughts, and the answer as it stands in a history, behind a prompt that begins or closes thoughts."""
    message, base, closed = messages[index], prompt[: begun.at], begun.closed
    thoughts, said = _split(message, begun)
    if closed == bool(thoughts.strip()):
        text = renderer.render(messages[: index + 1], tools=tools)[0]
        because = "its prompt closes the model's thoughts, and the answer has some" if closed else (
            "its prompt begins the model's thoughts, and the answer has none")  # fmt: skip
        raise UnmaskableError(*no_beginning(prompt, text, index, because))
    plain = {**{key: value for key, value in message.items() if key != "reasoning_content"}, "content": said}
    text, tags = renderer.render([*messages[:index], plain], tools=tools)
    answer = text[len(base) :]
    if not text.startswith(base) or answer.lstrip().startswith(begun.opening.strip()):
        return None
    if not closed:
        answer = _joined(thoughts, answer, said, begun, "reasoning_content" in message)
    return _behind(prompt, answer, text, tags)


def _behind(prompt: str, answer: str, text: str, tags: Sequence[tuple[int, int]]) -> Behind:
    """The prompt and the answer, which `text` ends with; what stands behind its last tag does not train."""
    whole = prompt + answer
    return len(prompt), whole, max(len(whole) - (len(text) - tags[-1][1] if tags else 0), len(prompt))


def _split(message: Message, begun: _Begun) -> tuple[str, str]:
    """(thoughts, content) of an answer; thoughts may stand in its content: `<think>…</think>…`, or `…</think>…`."""
    content = message.get("content") or ""
    if "reasoning_content" in message:
        return message["reasoning_content"] or "", content
    thoughts, mark, said = content.partition(begun.closing)
    return (thoughts.removeprefix(begun.opening), said) if mark else ("", content)


def _joined(thoughts: str, answer: str, said: str, begun: _Begun, apart: bool) -> str:
    """What the model says from within its thoughts on.

    Args: apart: the record holds the thoughts apart from the content, so that white space around them is lost.
    """
    if apart:
        before, between = begun.gap, begun.gap * 2
        thoughts = thoughts.strip()
    else:  # the record holds what the model said
        before, between = "", said[: len(said) - len(said.lstrip())]
        thoughts = thoughts.removeprefix(begun.gap)
    if answer.startswith(begun.closing):  # the history closes the thoughts itself
        return thoughts + before + answer
    return thoughts + before + begun.closing + ("" if answer[:1].isspace() else between) + answer


def _before_foot(
    renderer: Renderer, messages: Sequence[Message], index: int, tools: Sequence[dict[str, Any]], prompt: str
) -> Behind | None:
    """The answer without the words that the template writes behind the last message, answered or not."""
    before, (text, tags) = (
        renderer.render(messages[:index], tools=tools)[0],
        renderer.render(messages[: index + 1], tools=tools),
    )
    words = prompt[len(before) :]
    header = text.rfind(words, 0, len(os.path.commonprefix([prompt, text])) + len(words))
    if not words or header < 0 or not prompt.startswith(before):
        return None
    foot = before[header:]
    if not foot or not before.startswith(text[:header]) or not text.endswith(foot):
        return None
    text = text.removesuffix(foot)
    return _behind(prompt, text[header + len(words) :], text, tags)


def _moved(
    renderer: Renderer, messages: Sequence[Message], index: int, tools: Sequence[dict[str, Any]], prompt: str
) -> Behind | None:
    """The answer as it stands after a plain question.

    None unless the real text ends with this answer and the generation prompt is the plain question's.
    """
    try:
        (alone, tags), asked = (
            renderer.render([PROBE[0], messages[index]], tools=tools),
            renderer.prompt(PROBE[:1], tools),
        )
        text = renderer.render(messages[: index + 1], tools=tools)[0]
        words = renderer.prompt(messages[:index], tools)[1]
    except RefusedError:
        return None
    answer = alone[len(asked[0]) :]
    if not alone.startswith(asked[0]) or not text.endswith(answer) or words != asked[1]:
        return None
    return _behind(prompt, answer, alone, tags)
