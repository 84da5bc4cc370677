"""Text without private facts: paths, private parts of addresses, values of environment variables."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Mapping

#: what replaces a path
LOCAL_PATH = "LOCAL_PATH"
#: shortest private text that is searched for inside other text; a shorter one might be any word
LONG = 8
#: limits of the search for a path's end: characters of the text, possible ends
MOST, PARTS = 4096, 32
#: public hosts, and this machine
PUBLIC = re.compile(
    r"(.*\.)?(huggingface\.co|arxiv\.org|github\.com|pytorch\.org|localhost|127(\.\d+){3}|\[::1\])", re.I
)
#: environment variables with secrets, which a server's answer or an error might repeat
KEYS = ("OPENAI_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY")

_ADDRESS = re.compile(
    r"\b([a-z][a-z0-9+.-]*)://((?:[^\s/?#'\"`]*@)?)([^\s/?#:'\"`]*)((?::\d+)?[^\s?#'\"`]*)(?:[?#][^\s'\"`]*)?", re.I
)
_PATH = re.compile(r"(?<![\w/:.…}])(?:~[\w.-]*|\.{1,2})?/[^\s'\"`,;:()\[\]{}<>|]+")
#: the beginning of a path, and what may follow an existing folder
_BEGINS, _REST = re.compile(r"(~[\w.-]*|\.{1,2}|/[^/\n]+)/"), re.compile(r"/[^\s'\"`,;:()\[\]{}<>|]+")
_ENDS = re.compile(r"[/\s'\"`,;:()\[\]{}<>|]|$")
_QUOTED = re.compile(r"([\"'`])(?:~[\w.-]*|\.{1,2})?/[^\"'`\n]*/[^\"'`\n]*\1")
_OPENS = re.compile(r"\$\{\s*oc\.env:\s*")
#: quoted text (whose braces do not count), and braces
_BRACES = re.compile(r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"|[{}]", re.DOTALL)


def without_defaults(text: str) -> str:
    """The text with `${oc.env:NAME,default}` as `${oc.env:NAME}`.

    If a default reads another variable, the name of that one stays: `${oc.env:A,${oc.env:B}}`.
    """
    shown, place = [], 0
    while match := _OPENS.search(text, place):
        inside, end = _inside_braces(text, match.end())
        name, _, default = inside.partition(",")
        more = "".join(f",${{oc.env:{other}}}" for other in variables(default))
        shown.append(f"{text[place : match.start()]}${{oc.env:{name.strip()}{more}}}")
        place = end
    return "".join([*shown, text[place:]])


def variables(text: str) -> list[str]:
    """Names of the environment variables that a recipe's text reads by `${oc.env:NAME}`."""
    return list(dict.fromkeys(re.findall(r"\$\{\s*oc\.env:\s*([^,}\s$]+)", text)))


def _inside_braces(text: str, start: int) -> tuple[str, int]:
    """The text from `start` to the closing brace, and the place after it; everything if no brace closes."""
    depth = 1
    for match in _BRACES.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return text[start : match.start()], match.end()
    return text[start:], len(text)


def published_text(text: str, environment: Iterable[str] = ()) -> str:
    """A sentence without paths, private parts of addresses and the values of these environment variables."""
    return without_private(text, private_values([*environment, *variables(text)]))


def private_values(names: Iterable[str]) -> dict[str, str]:
    """Private text → what replaces it: values of these variables, and of KEYS."""
    keys = {os.environ[name]: f"${name}" for name in KEYS if len(os.environ.get(name, "")) >= LONG}
    named = {os.environ[name]: f"${{oc.env:{name}}}" for name in names if os.environ.get(name, "").strip()}
    return {**keys, **named}


def setting_without_private(text: str, words: Mapping[str, str]) -> str:
    """As `without_private`, for a value that is no sentence: if it begins like a path, all of it is one."""
    text = _replaced(text, words)
    return LOCAL_PATH if _BEGINS.match(text) else without_private(text, {})


def _replaced(text: str, words: Mapping[str, str]) -> str:
    """The text with every word of `words` that is long enough, or a path, replaced."""
    for word in sorted(words, key=len, reverse=True):  # the longest first, because one may contain another
        if len(word) >= LONG or (len(word) > 3 and ("/" in word or "." in word)):
            text = text.replace(word, words[word])
    return text


def without_private(text: str, words: Mapping[str, str]) -> str:
    """A sentence without paths, private parts of addresses and `words` (private text → what replaces it)."""
    text = _ADDRESS.sub(_address, without_defaults(_replaced(text, words)))
    home = os.path.expanduser("~")
    if len(home) > 1:
        text = text.replace(home, "~")
    # in quotes a path may hold spaces
    text = _QUOTED.sub(lambda match: f"{match[1]}{LOCAL_PATH}{match[1]}", text)
    shown, place = [], 0
    while match := _PATH.search(text, place):
        end = max(match.end(), _end_of_path(text, match.start()))
        shown.append(text[place : match.start()] + _path(text[match.start() : end]))
        place = end
    return "".join([*shown, text[place:]])


def _end_of_path(text: str, start: int) -> int:
    """Where an existing path ends; its folders and its name may contain spaces and signs."""
    if len(text) > MOST or "\0" in text:
        return start  # too long to be a sentence of ours
    line = text[start:].partition("\n")[0]
    ends = [match.start() for match in itertools.islice(_ENDS.finditer(line), PARTS) if match.start() > 1]
    there = max((end for end in ends if os.path.exists(os.path.expanduser(line[:end]))), default=0)
    # the file in the last folder need not exist
    rest = _REST.match(line, there) if there else None
    return start + (rest.end() if rest else there)


def _address(match: re.Match[str]) -> str:
    scheme, _, host, rest = match[1], match[2], match[3], match[4]
    if scheme.lower() == "file":
        return LOCAL_PATH
    return f"{scheme}://{host if PUBLIC.fullmatch(host) else 'SERVER'}{rest}"


def _path(text: str) -> str:
    # a single name such as `/red` is a path only if it exists
    return text if re.fullmatch(r"/[^/]*", text) and not os.path.exists(text) else LOCAL_PATH
