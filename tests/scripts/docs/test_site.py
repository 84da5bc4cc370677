"""The documentation builds as a site: strict, with sound links and anchors, formulas without scripts, no network."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from types import ModuleType

import pytest
from doc_blocks import ROOT, module_at

mkdocs = pytest.importorskip("mkdocs")


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    return module_at(ROOT / ".ci/site.py")


def built(docs: Path, place: Path) -> Path:
    """Build the pages of `docs` as `mkdocs build --strict` does, and return the site's folder."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    config = load_config(str(ROOT / "mkdocs.yml"), docs_dir=str(docs), site_dir=str(place), strict=True)
    config.plugins.on_startup(command="build", dirty=False)
    try:
        build(config)
    finally:
        config.plugins.on_shutdown()
    return place


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(ROOT / "docs", tmp_path_factory.mktemp("site"))


def test_the_site_builds_and_holds_every_page(site: Path) -> None:
    pages = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    made = {str(path.relative_to(site)) for path in site.rglob("*.html")}
    missing = {str(page.with_suffix(".html")).replace("README.html", "index.html") for page in pages} - made
    assert not missing and "CONTRIBUTING.html" in made
    assert "heads ← data ← eval ← train ← recipes ← scripts" in (site / "CONTRIBUTING.html").read_text()


def test_links_to_the_code_lead_to_pages_that_show_it(site: Path) -> None:
    text = (site / "architecture.html").read_text()
    assert 'href="source/train/loop.py.html"' in text
    assert "class" in (site / "source/train/loop.py.html").read_text()
    assert (
        "<code>loop.py</code>" in (site / "source/train.html").read_text() or (site / "source/train.md.html").exists()
    )


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_of_the_top_hold_with_their_anchors(page: str, site: Path) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)", text)
    assert links
    for path, anchor in links:
        assert not path or (ROOT / path).exists(), f"{page}: {path}"
        if anchor and path.startswith("docs/"):
            made = site / path.removeprefix("docs/").replace("README.md", "index.md").replace(".md", ".html")
            assert f'id="{anchor}"' in made.read_text(encoding="utf-8"), f"{page}: {path}#{anchor}"


def test_formulas_are_drawn_without_a_script(site: Path) -> None:
    text = (site / "maths.html").read_text()
    assert text.count("<math ") > 20 and "\\frac" not in re.sub(r"<annotation.*?</annotation>", "", text)
    assert "arithmatex" not in text


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("(walkthrough-laptop.md)", "(walkthrough-desktop.md)", "walkthrough-desktop"),
        ("(results/README.md)", "(results/README.md#no-such-heading)", "no-such-heading"),
        ("(../CONTRIBUTING.md)", "(../scripts/nothing.py)", "nothing.py"),
        ("(figures/results.svg)", "(https://example.org/results.svg)", "example.org"),
        ("## The words", "$$\\frac{1}{$$\n\n## The words", "cannot be read"),
    ],
)
def test_the_build_refuses(
    old: str, new: str, complaint: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    page = tmp_path / "docs/index.md"
    text = page.read_text()
    assert old in text
    page.write_text(text.replace(old, new, 1))
    with pytest.raises(BaseException) as stop:  # noqa: B017 - mkdocs leaves with SystemExit or an error of its own
        built(tmp_path / "docs", tmp_path / "site")
    assert complaint in caplog.text + str(stop.value)


def test_what_a_browser_would_fetch_is_found(hooks: ModuleType) -> None:
    for text in (
        '<script async src="https://cdn.example/x.js"></script>',
        '<link rel="stylesheet" href="//fonts.example/css">',
        "<style>@import 'https://x.example/a.css'</style>",
        "<img alt=x src=http://x.example/a.png>",
    ):
        assert hooks.FETCHED.search(text), text
    assert not hooks.FETCHED.search('<a href="https://arxiv.org/abs/1">paper</a><script src="assets/a.js"></script>')


def test_the_theme_asks_the_network_for_nothing(hooks: ModuleType, site: Path) -> None:
    for path in [*site.rglob("*.html"), *site.rglob("*.css")]:
        assert not (found := hooks.FETCHED.search(path.read_text(encoding="utf-8"))), f"{path.name}: {found}"
