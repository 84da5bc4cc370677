"""The code of the documentation: fenced blocks, the comments that say how they are tested, and the commands in them.

A block of bash is preceded by a comment that says what its test does. In every case each command is parsed by the real
command line, and its recipe and overrides are resolved.

    <!-- run -->                it runs as it stands
    <!-- run: tiny -->          it runs with a tiny random target in the place of SmolLM2, and settings of seconds
    <!-- needs: minutes -->     it takes minutes
    <!-- needs: gpu -->         it needs a GPU, or several processes
    <!-- needs: server -->      it needs a serving engine
    <!-- needs: download -->    it reads weights or data of the Hub
    <!-- needs: names -->       it holds names for the reader to fill in, such as RECIPE or my_prompts.jsonl
"""

from __future__ import annotations

import importlib.util
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
HOW = ("run", "run: tiny", "needs: minutes", "needs: gpu", "needs: server", "needs: download", "needs: names")
#: what may stand for a name: words in capitals, names of somebody's files and repositories
PLACEHOLDER = re.compile(
    r"\b(RECIPE|DIR|FILE|TARGET|NAME|NEW|RUN|T)\b|\buser/|\b(my_\w+|log|ours|spec_bench|humaneval|tau_check|prompts)\.jsonl"
    r"|runs/(mine|first|a|b)\b"
)
FENCE = re.compile(
    r"^(?:<!-- (?P<how>(?:run|needs)[^\n]*?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S
)


@dataclass(frozen=True)
class Block:
    """page: from the repository's top. line: of its first line of code. how: of the comment above it, or None."""

    page: str
    line: int
    language: str
    text: str
    how: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """All pages that people read, from the repository's top."""
    docs = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))
    return ["README.md", "CONTRIBUTING.md", *docs]


def blocks(language: str) -> list[Block]:
    found = []
    for page in pages():
        text = (ROOT / page).read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            line = text.count("\n", 0, match.start("text")) + 1
            if match["language"] == language:
                found.append(Block(page, line, language, match["text"], match["how"]))
    return found


def commands(text: str) -> list[list[str]]:
    """The commands of a block of bash, each as its words. `&&`, `;` and `|` part commands; comments are left out."""
    found: list[list[str]] = []
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line.replace("…", ""), posix=True, punctuation_chars="|;&")
        lexer.whitespace_split, lexer.commenters = True, "#"
        words: list[str] = []
        for word in lexer:
            if set(word) <= set("|;&"):
                found.append(words)
                words = []
            else:
                words.append(word)
        found.append(words)
    return [words for words in found if words]


def module_at(path: Path) -> ModuleType:
    """A Python file that belongs to no package, as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
