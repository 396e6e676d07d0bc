"""What the process beside a GPU takes: nothing is left running, and nothing frozen."""

import gc
import json

import psutil
import pytest

from benchmarks import host_costs


@pytest.mark.slow
def test_rows_are_written_and_nothing_is_left_running_or_frozen(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(host_costs, "COMPLETIONS", 2)
    host_costs.main(["--out", str(tmp_path / "rows.json"), "--threads", "1", "--busy", "1"])
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["kind"] for row in rows] == ["collection", "collection", "threads"]
    as_it_is, frozen, threads = rows
    assert frozen["milliseconds"] < as_it_is["milliseconds"] / 5
    assert (threads["busy"], threads["threads"], threads["completions"]) == (1, 1, 2)
    assert min(threads["metrics_ms"], threads["losses_ms"]) > 0
    assert "\n\n".join(host_costs.tables(rows)) in capsys.readouterr().out
    assert not [child for child in psutil.Process().children() if "spawn_main" in "".join(child.cmdline())]
    assert gc.get_freeze_count() == 0
