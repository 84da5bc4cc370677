"""A chat template that writes today's date shows one day for a whole run."""

from __future__ import annotations

from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from headstart.heads.errors import ConfigError
from headstart.heads.targets.template_date import fix_date, fix_dates, fixed_date, shown_date

TEMPLATE = (
    "{% if not date_string is defined %}{% if strftime_now is defined %}"
    "{% set date_string = strftime_now('%d %b %Y') %}{% else %}{% set date_string = 'unknown' %}{% endif %}{% endif %}"
    "{{ 'Today: ' + date_string }}{% for m in messages %}{{ m.content }}{% endfor %}"
)


def render(template: str, **variables) -> str:
    return render_jinja_template([[{"role": "user", "content": " Hi"}]], chat_template=template, **variables)[0][0]


def test_the_day_is_the_one_given_on_any_day():
    assert render(fix_date(TEMPLATE, "2026-03-05")) == "Today: 05 Mar 2026 Hi"
    assert render(fix_date(TEMPLATE, "2026-03-05"), date_string="never") == "Today: never Hi", "variables still count"
    today = datetime.now(UTC)
    assert render(fix_date(TEMPLATE)) == f"Today: {today:%d %b %Y} Hi"


@pytest.mark.parametrize(
    "format", ["%Y-%m-%d", "%B %d, %Y", "%A %-d %b %y", "%d/%m/%Y %H:%M", "%-m.%-d.", "none", "%j"]
)
def test_every_directive_says_what_strftime_says(format):
    template = "{{ strftime_now(" + repr(format) + ") }}"
    assert render(fix_date(template, "2026-03-05")) == datetime(2026, 3, 5, 12).strftime(format)


@pytest.mark.parametrize("start", ["", "\n", "  {% if true %}\n  {% endif %}", "{{- '' }}", "{#- x #}\n\n  "])
def test_the_text_is_what_it_was(start):
    """The prelude must not change how Jinja trims the beginning of the template."""
    template = start + "{{ messages[0].content }}{% if false %}{{ strftime_now('%d') }}{% endif %}"
    assert render(fix_date(template)) == render(template)


def test_once_and_only_where_a_date_is_shown():
    fixed = fix_date(TEMPLATE, "2026-03-05")
    assert fix_date(fixed, "2027-01-01") == fixed and fixed_date(fixed) == "2026-03-05"
    assert fix_date("{{ messages }}", "2026-03-05") == "{{ messages }}" and fixed_date("{{ messages }}") is None
    tokenizer = SimpleNamespace(chat_template={"default": "{{ messages }}", "tool_use": TEMPLATE})
    fix_dates(tokenizer, "2026-03-05")
    assert shown_date(tokenizer) == "2026-03-05" and tokenizer.chat_template["default"] == "{{ messages }}"
    assert shown_date(SimpleNamespace(chat_template=None)) is shown_date(None) is None


@pytest.mark.parametrize("text", ["today", "2026-13-01", "05.03.2026", ""])
def test_what_is_no_date_is_refused(text):
    tokenizer = SimpleNamespace(chat_template="{{ messages }}")
    with pytest.raises(ConfigError, match="target.template_date: found .*, expected a date like 2026-01-31"):
        fix_dates(tokenizer, text)
