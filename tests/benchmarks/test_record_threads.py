"""The measurement of a step's metrics by threads: its table is the page's, and it leaves nothing running."""

import json
from pathlib import Path

import psutil

from benchmarks import record_threads
from benchmarks.stored import stored

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"


def test_rows_are_written_and_what_computed_beside_them_is_gone(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(record_threads, "COMPLETIONS", 2)
    record_threads.main(["--out", str(tmp_path / "rows.json"), "--threads", "1", "--busy", "1"])
    (row,) = json.loads((tmp_path / "rows.json").read_text())
    assert (row["kind"], row["busy"], row["threads"], row["completions"]) == ("record", 1, 1, 2)
    assert record_threads.table([row]) in capsys.readouterr().out
    assert not [child for child in psutil.Process().children() if "spawn_main" in "".join(child.cmdline())]


def test_the_page_has_the_table_of_what_is_stored():
    assert record_threads.table(stored("record_threads")) + "\n\n" in PAGE.read_text()
