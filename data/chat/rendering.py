"""Messages → text by the tokenizer's chat template, in the form in which the template takes them.

Templates differ in the form of message that they take: a content as text or as a list of parts, the arguments of a tool
call as an object or as JSON text, the empty content beside a tool call as "" or as null. A wrong form raises no error:
the content is missing from the text, or is encoded twice. So a small conversation is rendered in every form
(`find_form`), and the first that works is used.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from headstart.data.chat.call_ids import nine_characters
from headstart.data.chat.one_pass import OnePass
from headstart.data.records.messages import Message
from headstart.heads.errors import TemplateError
from headstart.heads.targets.template_date import fix_date, fixed_date

GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
PROBE = ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there."})
#: a question, a tool call and its result; some templates want nine characters in an id
CALL_PROBE: tuple[Message, ...] = (
    PROBE[0],
    {"role": "assistant", "content": "", "tool_calls": [{"id": "probe1234", "type": "function", "function": {
        "name": "probe_name", "arguments": {"probe_key": "probe value", "probe_flag": True}}}]},
    {"role": "tool", "name": "probe_name", "tool_call_id": "probe1234", "content": "1"},
)  # fmt: skip


class RefusedError(TemplateError):
    """This conversation cannot be rendered; others may be fine. `reason` is the message without details."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(reason + detail)
        self.reason = reason


class UnmaskableError(RefusedError):
    """The conversation was rendered, but its text does not tell which tokens are the assistant's."""


@dataclass(frozen=True)
class Form:
    """How a template takes messages.

    Attributes:
        parts: contents as lists of text parts.
        text_arguments: the arguments of a tool call as JSON text.
        no_content: the empty content beside tool calls as null.
        short_ids: ids of tool calls of nine characters.
    """

    parts: bool = False
    text_arguments: bool = False
    no_content: bool = False
    short_ids: bool = False

    def apply(self, message: Message) -> Message:
        """The message as the template wants it."""
        shaped = dict(message)
        if message.get("reasoning_content") is not None:
            # templates read it under these names
            shaped |= {name: message["reasoning_content"] for name in ("thinking", "reasoning")}
        if message.get("tool_calls"):
            shaped["tool_calls"] = [self._call(call) for call in message["tool_calls"]]
            if self.no_content and not message.get("content"):
                shaped["content"] = None
        if self.parts and isinstance(shaped.get("content"), str):
            shaped["content"] = [{"type": "text", "text": shaped["content"]}]
        return shaped

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        if isinstance(call.get("function"), dict):
            return {**call, "function": self._call(call["function"])}
        arguments = call_arguments(call)
        return {**call, "arguments": json.dumps(arguments, ensure_ascii=False) if self.text_arguments else arguments}


def call_arguments(call: dict[str, Any]) -> Any:
    """Arguments of a tool call (its `function` object) as an object; text that is no JSON stays text."""
    arguments = call.get("arguments")
    try:
        return json.loads(arguments) if isinstance(arguments, str) and arguments.strip() else arguments or {}
    except ValueError:
        return arguments


class Renderer:
    """A tokenizer's chat template with the variables it is given.

    Attributes:
        foot: text that the template writes once, after the last message; `render` leaves it out.

    Raises: TemplateError when the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any, template_kwargs: dict[str, Any] | None = None):
        self.template = fix_date(chat_template(tokenizer))
        #: models with several templates have one for conversations with tools
        self.tool_template = fix_date(chat_template(tokenizer, [{"type": "function"}]))
        self.variables = {**tokenizer.special_tokens_map, **(template_kwargs or {})}
        self.foot = ""
        self.form = Form()
        self.form = find_form(self)
        self._passes: dict[str, OnePass | None] = {}
        #: kinds of messages for which one run of the template was found to tell the same as rendering every prefix
        self.proven: set[frozenset[tuple[str, ...]]] = set()

    def prepared(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages with ids of tool calls that the template takes."""
        return nine_characters(messages) if self.form.short_ids else messages

    def tagged(self, tools: Sequence[dict[str, Any]] = ()) -> bool:
        """Whether the template marks the assistant's text by `{% generation %}` tags."""
        return GENERATION_TAG.search(self.tool_template if tools else self.template) is not None

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = False,
        tools: Sequence[dict[str, Any]] = (),
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the character spans of the template's `{% generation %}` tags.

        Raises: RefusedError with the template's own reason.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        template, tagged = self.tool_template if tools else self.template, self.tagged(tools)
        try:
            result: Any = render_jinja_template(
                conversations=[[self.form.apply(message) for message in messages]],
                tools=list(tools) or None,
                chat_template=template,
                return_assistant_tokens_mask=tagged,
                add_generation_prompt=add_generation_prompt,
                **self.variables,
            )
        except Exception as error:  # a template is a program that comes with the model, so it may raise anything
            raise RefusedError(f"the chat template refuses it: {str(error) or type(error).__name__}") from error
        rendered, tags = result
        text = rendered[0] if add_generation_prompt else rendered[0].removesuffix(self.foot)
        return text, [(start, min(end, len(text))) for start, end in tags[0]] if tagged else []

    def run_once(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()
    ) -> tuple[str, list[int], str] | None:
        """The text that `render` gives; where each message begins in it, and the end; and what a prompt ends with.

        None unless one run of the template proves this (`one_pass.py`).
        """
        template = self.tool_template if tools else self.template
        if template not in self._passes:
            variables = plain_data(self.variables)
            self._passes[template] = OnePass.of(template, variables, plain_messages(map(self.form.apply, PROBE[:1])))
        one = self._passes[template]
        if one is None or one.end not in ("", self.foot):
            return None
        try:
            if self.form.parts or not all(map(_is_plain, messages)):
                messages = plain_messages(map(self.form.apply, messages))
            text, marks = one.run(messages, plain_data(list(tools)) if tools else None)
        except Exception:  # the template refuses the messages, or it looks further than one run shows
            return None
        return text[: marks[-1]], marks, one.prompt

    def prompt(self, history: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> tuple[str, str]:
        """The prompt's text, and the end of it that is the generation prompt."""
        before, text = (self.render(history, asking, tools)[0] for asking in (False, True))
        return text, text[len(os.path.commonprefix([before, text])) :]

    @cached_property
    def opens_thoughts(self) -> bool:
        """Whether the prompt ends with `<think>`, so that the answer begins within its thoughts."""
        words = self.prompt(PROBE[:1])[1]
        return words.rfind("<think>") > words.rfind("</think>")

    def find_foot(self) -> str:
        """The end-of-text token that the template writes after the last message only (Phi-3's does); else "".

        No server writes it. With it, no conversation's text would be the beginning of a longer one's.
        """
        foot = self.variables.get("eos_token") or ""
        try:
            asked, answered, more = (self.render(m)[0] for m in (PROBE[:1], PROBE, [*PROBE, PROBE[0]]))
        except RefusedError:
            return ""
        ended = all(text.endswith(foot) for text in (asked, answered, more))
        return foot if ended and more.startswith(answered.removesuffix(foot)) and not more.startswith(answered) else ""

    def notes(self) -> list[str]:
        """Lines for the data report about how this template is used."""
        lines = []
        if date := fixed_date(self.template) or fixed_date(self.tool_template):
            lines.append(f"the chat template shows the date, which is fixed at {date} (target.template_date)")
        if self.form.parts:
            lines.append("contents are given as lists of text parts (the chat template drops plain text)")
        if self.form.short_ids:
            lines.append("ids of tool calls are cut to nine characters (the chat template takes no others)")
        if self.form.text_arguments:
            lines.append("arguments of tool calls are given as JSON text (the chat template takes no object)")
        return lines


def plain_data(value: Any) -> Any:
    """Data as transformers gives it to a template: newer versions rebuild it from plain JSON types."""
    from transformers.utils import chat_template_utils as library

    rebuild = getattr(library, "_plain_template_data", None)
    return rebuild(value) if rebuild else value


def plain_messages(messages: Iterable[Message]) -> list[Message]:
    """Messages as transformers gives them to a template: newer versions also give their thoughts all names."""
    from transformers.utils import chat_template_utils as library

    plain = [plain_data(message) for message in messages]
    rename = getattr(library, "_alias_reasoning_fields", None)
    return rename(plain) if rename else plain


def _is_plain(message: Message) -> bool:
    """Whether a message has a role and a text alone, so that every template may be given it as it is."""
    return len(message) == 2 and type(message.get("content")) is str and type(message.get("role")) is str


def chat_template(tokenizer: Any, tools: list[dict[str, Any]] | None = None) -> str:
    """The tokenizer's chat template (for `tools`, where it has one of its own for them).

    Raises: TemplateError with the remedy when there is none.
    """
    try:
        return tokenizer.get_chat_template(tools=tools) if tools else tokenizer.get_chat_template()
    except (ValueError, AttributeError) as error:
        name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        raise TemplateError(
            f"tokenizer {name}: found no chat template, expected one (base models have none): "
            "use the instruct model, or give a Jinja file with target.chat_template=FILE.jinja"
        ) from error


def find_form(renderer: Renderer) -> Form:
    """The form in which a small conversation is rendered completely; the plain one if none does that.

    Of several forms, the shortest text wins: an empty content beside a tool call may be written as a second answer.
    """
    form = next((form for form in (Form(), Form(parts=True)) if _takes_text(renderer, form)), Form())
    choices = [
        replace(form, text_arguments=text, no_content=nothing) for text in (False, True) for nothing in (False, True)
    ]
    written = [(len(text), number) for number, choice in enumerate(choices) if (text := _calls(renderer, choice))]
    objects = [entry for entry in written if not choices[entry[1]].text_arguments]
    chosen = choices[min(objects or written)[1]] if written else form
    return replace(chosen, short_ids=bool(written) and not _calls(renderer, chosen, "call_of_probe_1"))


def _takes_text(renderer: Renderer, form: Form) -> bool:
    probe = [{"role": "user", "content": "Probe one?"}, {"role": "assistant", "content": "Probe two."}]
    text = _try(renderer, form, probe)
    return "Probe one?" in text and "Probe two." in text


def _calls(renderer: Renderer, form: Form, name: str = "probe1234") -> str:
    """The text of a tool call, if its arguments are in it once, and neither as Python nor encoded twice; else "".

    Args: name: the id of the call.
    """
    question, calling, result = CALL_PROBE
    calling = {**calling, "tool_calls": [{**calling["tool_calls"][0], "id": name}]}
    result = {**result, "tool_call_id": name}
    tool = {"type": "function", "function": {"name": "probe_name", "description": "", "parameters": {
        "type": "object", "properties": {}}}}  # fmt: skip
    for messages in ([question, calling], [question, calling, result, PROBE[1]]):
        text = _try(renderer, form, messages, [tool])
        once = text.count("probe_key") == text.count("probe value") == 1
        wrong = ("'probe_key'", '\\"probe_key', *(("None",) if form.no_content else ()))
        if once and "probe_name" in text and not any(word in text for word in wrong):
            return text
    return ""


def _try(renderer: Renderer, form: Form, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> str:
    kept, renderer.form = renderer.form, form
    try:
        return renderer.render(messages, tools=tools)[0]
    except RefusedError:
        return ""
    finally:
        renderer.form = kept
