"""The report's page in a real browser: Debian's chromium, driven by playwright, checked by axe-core.

`.ci/run` installs all three. AXE_CORE names the file axe.min.js, CHROMIUM the browser (/usr/bin/chromium).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from page_help import HOSTILE, bare, hostile, whole

from headstart.eval.measuring.page.page import render_page
from headstart.eval.measuring.rendering import page_said
from headstart.eval.measuring.report import Report

pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(120),
    pytest.mark.skipif("AXE_CORE" not in os.environ, reason="needs a browser and axe-core: bash .ci/browser"),
]

COMMITTED = Path(__file__).resolve().parents[2] / "docs/results/report.html"
ARGUMENTS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
#: WCAG 2 A and AA, and axe's best practices
RULES = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    program = os.environ.get("CHROMIUM", "/usr/bin/chromium")
    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=program, args=list(ARGUMENTS))
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages by what they hold."""
    place, made = tmp_path_factory.mktemp("pages"), {"committed": COMMITTED}
    wanted: dict[str, dict[str, Report]] = {
        "whole": {"": whole()}, "bare": {"": bare()}, "hostile": {"": hostile()},
        "several": {"runs/one": whole(), "runs/two": whole(tau=3.5, temperature=0.5, verdict=None), "three": bare()},
    }  # fmt: skip
    for name, reports in wanted.items():
        made[name] = place / f"{name}.html"
        said = page_said(reports, ["the runs differ in temperature"] if len(reports) > 1 else [])
        made[name].write_text(render_page({label: r.to_json() for label, r in reports.items()}, said), encoding="utf-8")
    return made


Open = Callable[..., Any]


@pytest.fixture
def open_page(browser: Any, pages: dict[str, Path]) -> Iterator[Open]:
    """Open a page by its name; whatever it writes to the console or asks of the network fails the test."""
    contexts, wrong = [], list[str]()

    def opened(name: str, **options: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: wrong.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (wrong.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: request.url.startswith(("file:", "data:")) or wrong.append(request.url))
        page.goto(pages[name].as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert wrong == []


NAMES = ("whole", "bare", "hostile", "several", "committed")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", NAMES)
def test_axe_finds_nothing(open_page: Open, name: str, scheme: str) -> None:
    page = open_page(name, color_scheme=scheme)
    page.click("#open-all")
    page.check("#show-all") if page.locator("#show-all").count() else None
    # in the page's own world: the page's policy allows no script from outside
    page.evaluate(Path(os.environ["AXE_CORE"]).read_text(encoding="utf-8"))
    found = page.evaluate("rules => axe.run({runOnly: {type: 'tag', values: rules}})", list(RULES))
    assert [(rule["id"], [node["html"][:200] for node in rule["nodes"]][:3]) for rule in found["violations"]] == []
    passed = {rule["id"] for rule in found["passes"]}
    assert {"color-contrast", "document-title", "heading-order", "region", "scrollable-region-focusable"} <= passed | {
        rule["id"] for rule in found["inapplicable"]
    }
    assert "color-contrast" in passed


@pytest.mark.parametrize("name", NAMES)
def test_it_opens_in_less_than_a_second(open_page: Open, name: str) -> None:
    page = open_page(name)
    taken = page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd")
    assert 0 < taken < 1000


@pytest.mark.parametrize("width", [360, 640, 1280])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_lies_beside_the_screen(open_page: Open, name: str, width: int) -> None:
    """Wide tables scroll by themselves; the page does not."""
    page = open_page(name, viewport={"width": width, "height": 800})
    page.click("#open-all")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_button_changes_the_colours(open_page: Open) -> None:
    page = open_page("whole", color_scheme="light")
    colour = "getComputedStyle(document.body).backgroundColor"
    stroke = "getComputedStyle(document.querySelector('#positions svg path[style*=\"--s1\"]')).stroke"
    light, line = page.evaluate(colour), page.evaluate(stroke)
    button = page.locator("#scheme")
    assert button.inner_text() == "Dark colours"
    button.press("Enter")
    assert button.inner_text() == "Light colours"
    dark = page.evaluate(colour)
    assert dark != light and page.evaluate(stroke) != line  # the plots follow
    page.reload()
    assert page.evaluate(colour) == dark
    asked = open_page("whole", color_scheme="dark")
    assert asked.evaluate(colour) == dark and asked.locator("#scheme").inner_text() == "Light colours"


def test_the_keyboard_reaches_everything(open_page: Open) -> None:
    page = open_page("whole")
    reached: list[str] = []
    for _ in range(150):
        page.keyboard.press("Tab")
        what = page.evaluate(
            "(e => e === document.body ? '' : e.id || e.getAttribute('href') || e.textContent.trim().slice(0, 40))"
            "(document.activeElement)"
        )
        shown = page.evaluate(
            "(e => e === document.body || parseFloat(getComputedStyle(e).outlineWidth) > 0)(document.activeElement)"
        )
        assert shown, what  # who uses the keyboard sees where they are
        if not what:
            break
        reached.append(what)
    assert reached[:3] == ["#main", "scheme", "open-all"]
    assert {"#tasks", "#samples", "#recipe"} <= set(reached) and "show-first" in reached
    summaries = [page.locator("summary").nth(n).inner_text()[:40] for n in range(page.locator("summary").count())]
    visible = [text for text in summaries if text.strip()]
    assert visible and set(visible) <= set(reached)
    recipe = page.locator("#recipe details")
    assert recipe.get_attribute("open") is None
    page.locator("#recipe summary").press("Enter")
    assert recipe.get_attribute("open") is not None


def test_rejected_drafts_are_hidden_and_shown(open_page: Open) -> None:
    page = open_page("whole")
    first, later = page.locator(".answer del:not(.l)"), page.locator(".answer del.l")
    assert first.first.is_visible() and not later.first.is_visible()
    page.locator("#show-first").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#show-all").is_checked() and later.first.is_visible()
    page.check("#show-none")
    assert not first.first.is_visible() and page.locator(".answer .a").first.is_visible()


def test_authors_are_told_apart_without_colour(open_page: Open) -> None:
    page = open_page("whole")
    style = "e => { const s = getComputedStyle(e); return [s.borderBottomStyle, s.textDecorationLine, e.tagName]; }"
    told = {kind: tuple(page.locator(f".answer .{kind}").first.evaluate(style)) for kind in "art"}
    assert len(set(told.values())) == 3
    assert told["r"][1] == "line-through" and told["a"][0] == "solid" and told["t"][0] == "dotted"
    assert page.locator(".answer .r").first.get_attribute("title").startswith("cycle 1: drafted at position 3")


@pytest.mark.parametrize("name", ["whole", "several"])
def test_it_prints(open_page: Open, name: str) -> None:
    page = open_page(name, color_scheme="dark")
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.locator("nav").is_visible() and not page.locator("#scheme").is_visible()
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("#recipe pre").first.is_visible()
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert not page.locator("#recipe pre").first.is_visible()
    printed = page.pdf(format="A4", print_background=False)
    assert printed.startswith(b"%PDF") and len(printed) > 20_000


def test_markup_of_others_is_text(open_page: Open) -> None:
    page = open_page("hostile")
    page.click("#open-all")
    assert page.locator("img").count() == 0 and page.locator("script").count() == 1
    assert HOSTILE[:25] in page.locator("#samples .answer").first.inner_text()
    assert HOSTILE[:25] in page.locator("h1").inner_text()
