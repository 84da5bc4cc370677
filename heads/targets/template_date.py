"""Fixes the date that a chat template shows: one day for a whole run, also if the run is continued on the next day."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, time
from typing import Any

from headstart.heads.errors import ConfigError

#: letters of the strftime directives that templates use
DIRECTIVES = "aAbBdmyYjeHIMSp"
MARK = re.compile(r"\A\{# date (\d{4}-\d\d-\d\d) #\}")


def parse_date(text: str) -> date:
    """Raises: ConfigError when `text` is no date like 2026-01-31."""
    try:
        return date.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(
            f"target.template_date: found {text!r}, expected a date like 2026-01-31, or null for that of the run"
        ) from error


def fix_date(template: str, text: str | None = None) -> str:
    """A template in which `strftime_now` gives noon of one day. A template without it is returned unchanged.

    Args: text: the day, like 2026-01-31; None: today in UTC.
    """
    if "strftime_now" not in template or MARK.match(template):
        return template
    noon = datetime.combine(parse_date(text) if text else datetime.now(UTC).date(), time(12))
    filters = ""
    for letter in DIRECTIVES:
        value = noon.strftime(f"%{letter}")
        filters += f"|replace('%-{letter}', '{value.lstrip('0 ') or '0'}')|replace('%{letter}', '{value}')"
    # a macro replaces the function of the same name; it stands on a line of its own, before the template's first
    macro = f"{{% macro strftime_now(format) %}}{{{{ format{filters} }}}}{{% endmacro %}}"
    return f"{{# date {noon:%Y-%m-%d} #}}{macro}\n{template}"


def fixed_date(template: str) -> str | None:
    """The date that `fix_date` gave the template, like 2026-01-31; None if it shows none."""
    match = MARK.match(template)
    return match.group(1) if match else None


def shown_date(tokenizer: Any) -> str | None:
    """The date that `fix_dates` gave the tokenizer's chat templates; None if they show none."""
    templates = getattr(tokenizer, "chat_template", None)
    every = templates.values() if isinstance(templates, dict) else [templates]
    return next((shown for template in every if isinstance(template, str) and (shown := fixed_date(template))), None)


def fix_dates(tokenizer: Any, text: str | None = None) -> None:
    """`fix_date` for every chat template of the tokenizer, in place."""
    if text is not None:
        parse_date(text)
    templates = getattr(tokenizer, "chat_template", None)
    if isinstance(templates, dict):
        tokenizer.chat_template = {name: fix_date(template, text) for name, template in templates.items()}
    elif isinstance(templates, str):
        tokenizer.chat_template = fix_date(templates, text)
