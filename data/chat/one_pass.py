"""The turns of a conversation from one run of its chat template, where this provably finds what `turn_at` does.

A template is a program that reads the messages and writes text. Many read them once, in order, in one loop: for such a
template, what it has written before it reads message k depends on the messages before k only. So it is also what the
template writes first when it is given those messages alone. Then it writes its end, the generation prompt. So

    prompt before message k  =  what stood there when message k was read  +  the end of a prompt

and one run tells where every prompt and every answer ends. Two things make this a proof for the record at hand:

- `_reads_once` looks at the template's syntax tree. One loop over the messages stands on the outside; what follows it
  depends on no message; nothing else asks whether a prompt is wanted; and the loop does not look ahead (`loop.last`).
- `_Watched` stands in for the list of messages. It notes what stood in the text when each message was read, and raises
  if the template asks for anything more: the number of messages, a later message, a second reading.

Where either fails, the caller renders prefix by prefix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from jinja2 import nodes

from headstart.data.records.messages import Message

#: what a loop may say about itself without looking at what is to come
BEHIND = frozenset({"first", "index", "index0", "previtem", "cycle", "changed", "depth", "depth0"})
#: nodes that may bring in other templates, or whose text is not written where they stand
FOREIGN = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends, nodes.Block, nodes.CallBlock)


class _LooksFurther(Exception):
    """The template asked for more than the messages in their order."""


class _Watched:
    """Messages as a template may read them: in order, once, or again by their index."""

    def __init__(self, messages: Sequence[Message], written: list[str]):
        self._messages, self._written = messages, written
        self._marks: list[int] = []
        self._begun = self._asked_more = False

    def __iter__(self) -> Iterator[Message]:
        if self._begun:
            self._refuse()
        self._begun = True
        for message in self._messages:
            self._marks.append(len(self._written))
            yield message
        self._marks.append(len(self._written))

    def __bool__(self) -> bool:
        return True  # so has every prompt

    def __getitem__(self, index: Any) -> Message:
        # the first message is in every prompt; others are, once they were read
        if type(index) is not int or not (index == 0 or 0 <= index < len(self._marks)):
            self._refuse()
        return self._messages[index]

    def marks(self) -> list[int]:
        """Number of parts of the text that stood there when each message was read, and when the last one had been.

        Raises: _LooksFurther if the template read the messages in another way; some tests of Jinja hide that.
        """
        if self._asked_more or len(self._marks) != len(self._messages) + 1:
            raise _LooksFurther
        return self._marks

    def _refuse(self, *_: object) -> Any:
        self._asked_more = True
        raise _LooksFurther

    __len__ = __contains__ = __eq__ = __ne__ = __lt__ = __str__ = __repr__ = __add__ = __radd__ = __mul__ = _refuse
    __reversed__ = __rmul__ = __le__ = __gt__ = __ge__ = __format__ = _refuse
    __hash__ = None  # type: ignore[assignment]


class OnePass:
    """A chat template that reads its messages once.

    Attributes:
        end, prompt: what the template writes after the messages, without and with a generation prompt.
    """

    def __init__(self, template: Any, variables: dict[str, Any]):
        self._template, self._variables = template, variables
        self.end = self.prompt = ""

    @classmethod
    def of(cls, source: str, variables: dict[str, Any], probe: Sequence[Message]) -> OnePass | None:
        """None if the template reads messages in another way.

        Args: probe: a question, as the template wants it.
        """
        from transformers.utils import chat_template_utils as library

        try:
            template: Any = library._compile_jinja_template(source)  # type: ignore[attr-defined]
            if not _reads_once(template.environment.parse(source)):
                return None
            given = {**template.globals, **variables, "documents": None}
            plain, asking = (cls(template, {**given, "add_generation_prompt": asks}) for asks in (False, True))
            plain.end, plain.prompt = plain._end(probe), asking._end(probe)
        except Exception:  # templates may raise anything, and the library's own function may be gone
            return None
        return plain

    def _end(self, messages: Sequence[Message]) -> str:
        text, marks = self.run(messages, None)
        return text[marks[-1] :]

    def run(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None) -> tuple[str, list[int]]:
        """The text without a generation prompt, and where it stood when each message was read and after the last.

        Raises: whatever the template raises, and where it asks for more than the messages in their order.
        """
        written: list[str] = []
        watched = _Watched(messages, written)
        values = {**self._variables, "messages": watched, "tools": tools}
        context = self._template.new_context(values, shared=True)
        for part in self._template.root_render_func(context):
            written.append(part)
        lengths = [0, *accumulate(map(len, written))]
        return "".join(written), [lengths[mark] for mark in watched.marks()]


def _reads_once(tree: nodes.Template) -> bool:
    """Whether the template's text before a message depends only on the messages before it; see the module."""
    if any(tree.find(kind) is not None for kind in FOREIGN):
        return False
    place = [number for number, node in enumerate(tree.body) if isinstance(node, nodes.For) and _over(node)]
    if len(place) != 1:
        return False
    loop, tail = tree.body[place[0]], tree.body[place[0] + 1 :]
    assert isinstance(loop, nodes.For)
    changed = {name.name for name in tree.find_all(nodes.Name) if name.ctx in ("store", "param")}
    changed |= {macro.name for macro in tree.find_all(nodes.Macro)} | {"messages", "loop", "tools"}
    asked = [name for node in tail for name in node.find_all(nodes.Name)]
    everywhere = [name for name in tree.find_all(nodes.Name) if name.name == "add_generation_prompt"]
    return (
        changed.isdisjoint({name.name for name in asked})
        and len(everywhere) == sum(name.name == "add_generation_prompt" for name in asked)
        and not any(name.name == "messages" and name.ctx != "load" for name in tree.find_all(nodes.Name))
        and loop.test is None
        and not loop.recursive
        and not loop.else_
        and not any(_looks_ahead(node) for node in loop.body)
    )


def _over(loop: nodes.For) -> bool:
    return isinstance(loop.iter, nodes.Name) and loop.iter.name == "messages"


def _looks_ahead(node: nodes.Node) -> bool:
    """Whether a node in the loop over the messages asks that loop what is to come."""
    if isinstance(node, nodes.Name):
        return node.name == "loop"  # as a whole: it may be asked elsewhere
    if isinstance(node, nodes.Getattr | nodes.Getitem) and isinstance(node.node, nodes.Name):
        if node.node.name == "loop":
            return (node.attr if isinstance(node, nodes.Getattr) else getattr(node.arg, "value", None)) not in BEHIND
    if isinstance(node, nodes.For):  # inside it, `loop` is its own
        return any(map(_looks_ahead, [node.iter, *node.else_, *([node.test] if node.test else [])]))
    return any(_looks_ahead(child) for child in node.iter_child_nodes())
