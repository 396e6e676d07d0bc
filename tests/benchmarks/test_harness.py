"""Rows that name their source, and that are on disk when a process ends."""

import json

import pytest

from benchmarks import harness
from benchmarks.harness import RESULTS, RowFile


@pytest.mark.parametrize("path", sorted(RESULTS.rglob("*.json")), ids=lambda path: path.stem)
def test_every_stored_row_has_the_schema(path):
    rows = json.loads(path.read_text())
    assert rows
    for row in rows:
        assert {"kind", "commit", "versions", "hardware", "command"} <= row.keys()
        assert row["commit"] is None or len(row["commit"]) in (7, 8, 40), row["commit"]


def test_a_checkout_without_git_is_said_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(harness, "git_state", lambda folder: {})
    assert harness.provenance()["commit"] is None
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_rows_are_stored_as_they_come(tmp_path):
    path = tmp_path / "rows.json"
    rows = RowFile(path, measurement="some")

    def stored():
        return [
            {name: value for name, value in row.items() if name in ("kind", "measurement", "runs")}
            for row in json.loads(path.read_text())
        ]

    started = {"kind": "start", "measurement": "some"}
    assert stored() == []
    rows.append({"kind": "start"})
    assert stored() == [started]

    def states():
        for runs in (1, 2):
            yield {"kind": "rollout", "runs": runs}
            assert stored() == [started, {"kind": "rollout", "measurement": "some", "runs": runs}]
        raise MemoryError("the third")

    with pytest.raises(MemoryError) as raised:
        rows.append_growing(states())
    rows.fail(raised.value)
    *kept, failed = json.loads(path.read_text())
    assert [row["kind"] for row in kept] == ["start", "rollout"]
    assert (failed["kind"], failed["error"]) == ("error", "MemoryError: the third")
    assert "in states" in failed["traceback"]
