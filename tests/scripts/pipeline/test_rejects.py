"""The rows that `on_bad: skip` left out stand in the run's report and in a file of their own."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from headstart.data.choosing.split import Split
from headstart.data.prepare import PreparedData, TokenizeReport
from headstart.data.records.messages import Where
from headstart.data.sources.rejects import Rejects
from headstart.heads.errors import DataError
from headstart.pipeline.data import save_data_report


def saved(folder: Path, *rejected: tuple[str, Where, int]) -> dict[str, Any]:
    rejects = Rejects()
    for message, where, row in rejected:
        rejects.add(DataError(f"{where}: {message}"), where, row)
    data = PreparedData(Split([], []), TokenizeReport(), None, rejects)
    (folder / "data").mkdir(exist_ok=True)
    run = SimpleNamespace(prepared=data, dir=folder, held_out_path=folder / "data" / "held_out.jsonl")
    save_data_report(cast(Any, run))
    return json.loads((folder / "data" / "report.json").read_text())


def test_rejects_of_a_run(tmp_path: Path) -> None:
    rows = [("messages[3].role: found 'x'", "a.jsonl:7", 7), ("messages[0].role: found 'y'", "b.csv: record 12", 12)]
    assert saved(tmp_path, *rows)["rejected"] == {"messages….role: found '…'": 2}
    lines = (tmp_path / "data" / "rejects.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"file": "a.jsonl", "row": 7, "reason": "messages[3].role: found 'x'"},
        {"file": "b.csv", "row": 12, "reason": "messages[0].role: found 'y'"},
    ]
    # another run of the step, with the rows mended
    assert "rejected" not in saved(tmp_path) and not (tmp_path / "data" / "rejects.jsonl").exists()
