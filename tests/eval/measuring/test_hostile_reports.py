"""A report that somebody changed: compared, or refused by its path."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

from reference.hostile import VALUES, within_seconds
from test_compare import report

from headstart.eval.measuring.compare import comparison_markdown, comparison_table, differences, read_reports
from headstart.eval.measuring.rendering import write_report
from headstart.heads.errors import DataError


def test_reports_that_were_changed_are_refused_by_name(tmp_path: Path) -> None:
    """150 changes of a report, always the same: it is compared, or refused with its path; never a traceback."""
    path = write_report(report(), tmp_path)
    written = json.loads(path.read_text())
    whole: list[tuple[Any, ...]] = [(name,) for name in written]
    whole += [("tasks", task, name) for task, row in written["tasks"].items() for name in row]
    refused = 0
    for number in range(150):
        dice = random.Random(number)
        changed = copy.deepcopy(written)
        *way, last = dice.choice(whole)
        inside = changed
        for part in way:
            inside = inside[part]
        inside[last] = dice.choice(VALUES)
        path.write_text(json.dumps(changed))
        try:
            with within_seconds(10):
                reports = read_reports([tmp_path])
                comparison_table(reports), differences(reports), comparison_markdown(reports)
        except DataError as error:
            assert str(path) in str(error)
            refused += 1
        except BaseException as error:
            error.add_note(f"{way}, {last}: {inside[last]!r}"[:300])
            raise
    assert 20 < refused < 140
