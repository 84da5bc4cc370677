"""Hooks of mkdocs: pages for files beside docs/, formulas as MathML, and a check that no page asks the network.

A link of a page to a file of the repository (`../eval/decoding/loop.py`) works on GitHub as it is. On the site, it
leads to a page that shows the file. A link to a file that is not there stops the build.
"""

from __future__ import annotations

import html
import posixpath
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
#: pages of the repository's top that are pages of the site too
TOP = ("CONTRIBUTING.md", "CHANGELOG.md")
LINK = re.compile(r"(?<!!)\]\((?!https?:|#|mailto:)([^)\s#]+)(#[^)\s]*)?\)")
FENCE = re.compile(r"^(```|~~~).*?^\1[ \t]*$", re.MULTILINE | re.DOTALL)
FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">(?:\\\((?P<inline>.*?)\\\)|\\\[(?P<block>.*?)\\\])</(?P=tag)>', re.DOTALL
)
#: what a browser fetches by itself; links that a reader follows are not among them
FETCHED = re.compile(
    r"""<(?:script|img|iframe|source|video|audio|embed)\b[^>]*?\bsrc=["']?(?:https?:)?//[^"'\s>]+"""
    r"""|<link\b(?=[^>]*\brel=["']?(?:stylesheet|icon|preconnect|preload|dns-prefetch|manifest))[^>]*?"""
    r"""\bhref=["']?(?:https?:)?//[^"'\s>]+"""
    r"""|url\(["']?(?:https?:)?//[^)]+\)|@import\s+["'](?:https?:)?//""",
    re.IGNORECASE,
)
LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".json": "json", ".toml": "toml", ".jinja": "jinja"}


def of_site(path: str) -> str:
    """The page that shows a file. Args: path: from the repository's top."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return path if path in TOP else f"source/{path}.md"


def linked(text: str, folder: str, page: str) -> tuple[str, set[str]]:
    """(the text with links that hold on the site, the files outside docs/ that it links to).

    Args: folder: the text's folder in the repository, from its top; page: its address on the site.
    Raises: PluginError where a file is missing.
    """
    outside: set[str] = set()

    def moved(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[1]))
        if folder.startswith("docs") and target.startswith("docs/"):
            return match[0]  # mkdocs checks these
        if not (ROOT / target).exists():
            raise PluginError(f"{page}: links to {match[1]}, which is not there")
        if not target.startswith("docs/") and target not in TOP:
            outside.add(target)
        to = of_site(target) if target != "README.md" else "index.md"
        return f"]({posixpath.relpath(to, posixpath.dirname(page) or '.')}{match[2] or ''})"

    parts, at = [], 0
    for fence in FENCE.finditer(text):
        parts += [LINK.sub(moved, text[at : fence.start()]), fence[0]]
        at = fence.end()
    return "".join([*parts, LINK.sub(moved, text[at:])]), outside


def shown(path: str) -> str:
    """A page that shows a file, or what a folder holds."""
    place = ROOT / path
    if place.is_dir():
        entries = sorted(each.name + "/" * each.is_dir() for each in place.iterdir() if not each.name.startswith("_"))
        listing = "\n".join(f"- `{name}`" for name in entries)
        return f"# {path}/\n\nA folder of the repository. It holds:\n\n{listing}\n"
    language = LANGUAGES.get(place.suffix, "text")
    return f"# {path}\n\n````` {language}\n{place.read_text(encoding='utf-8').rstrip()}\n`````\n"


def on_files(files: Files, config: Any) -> Files:
    """Adds a page for every file outside docs/ that a page links to."""
    outside: set[str] = set()
    for name in TOP:
        text, found = linked((ROOT / name).read_text(encoding="utf-8"), "", name)
        files.append(File.generated(config, name, content=text))
        outside |= found
    for file in list(files.documentation_pages()):
        if file.src_uri not in TOP:
            folder = posixpath.dirname(f"docs/{file.src_uri}")
            outside |= linked(file.content_string, folder, file.src_uri)[1]
    for path in sorted(outside):
        files.append(File.generated(config, of_site(path), content=shown(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    uri = page.file.src_uri
    if uri in TOP or uri.startswith("source/"):
        return markdown
    return linked(markdown, posixpath.dirname(f"docs/{uri}"), uri)[0]


def on_page_content(text: str, page: Any, **_: Any) -> str:
    """Formulas become MathML, which browsers draw without a script."""

    def drawn(match: re.Match[str]) -> str:
        block = match["block"] is not None
        formula = html.unescape(match["block"] if block else match["inline"]).strip()
        try:
            made = convert(formula, display="block" if block else "inline")
        except Exception as error:
            raise PluginError(f"{page.file.src_uri}: the formula {formula!r} cannot be read: {error}") from error
        return f'<div class="formula">{made}</div>' if block else made

    return FORMULA.sub(drawn, text)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    if found := FETCHED.search(output):
        raise PluginError(f"{page.file.src_uri}: a browser would fetch {found[0]!r} from the network")
    return output
