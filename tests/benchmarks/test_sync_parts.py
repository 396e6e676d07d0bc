"""The parts of a sync add up to it, and the engine holds what was sent each time."""

import json

import pytest

from benchmarks import sync_parts


@pytest.mark.slow
def test_parts_of_a_sync_lie_within_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sync_parts, "REPEATS", 3)
    options = ["--out", str(tmp_path), "--gpus", "1", "--tiny", "--models", "qwen3-8b", "--precisions", "fp8"]
    assert sync_parts.main(options) == 0
    (row,) = json.loads((tmp_path / "sync_parts.json").read_text())
    assert (row["kind"], row["gpus"], row["replicas"], row["probe_differing"]) == ("sync", 1, 1, 0)
    assert row["parts"].keys() == {*sync_parts.PARTS.values()}
    assert 0.5 * row["seconds"] < sum(row["parts"].values()) <= row["seconds"]
    assert row["all"] == sorted(row["all"])
    assert row["seconds"] == pytest.approx(row["all"][1])
    assert "| rehearsal of qwen3-8b, 2 layers | fp8 | 1 | 1 |" in capsys.readouterr().out
