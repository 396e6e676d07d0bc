"""What happens around timed rollouts; the timing itself needs a Hopper GPU."""

import json
import subprocess
import sys

import pytest

from benchmarks import rollout_hopper
from benchmarks.rollout_tables import rollout_table, run_table, trace_tables


def test_engines_after_the_budget_are_not_started(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rollout_hopper.subprocess, "Popen", lambda *_, **__: pytest.fail("started"))
    names = ["qwen3-8b/bf16/long", "llama-3.1-8b/bf16"]
    monkeypatch.setattr(sys, "argv", ["rollout_hopper.py", *names, f"--out={tmp_path}", "--seconds=0"])
    rollout_hopper.main()
    assert capsys.readouterr().out.splitlines() == [f"{name}: not started, the time is used up" for name in names]


def test_an_earlier_result_is_not_taken_for_that_of_an_engine_that_failed(tmp_path, monkeypatch):
    result = tmp_path / "llama-3.1-8b-bf16.json"
    result.write_text("[]")
    ended = subprocess.Popen(["true"])
    monkeypatch.setattr(rollout_hopper.subprocess, "Popen", lambda *_, **__: ended)
    monkeypatch.setattr(sys, "argv", ["rollout_hopper.py", "llama-3.1-8b/bf16", f"--out={tmp_path}"])
    rollout_hopper.main()
    assert not result.exists()


@pytest.fixture
def stored_rows(tmp_path, monkeypatch, pretend_engine):
    """The rows of an engine with two cells and a trace, started in none."""
    cells = (rollout_hopper.Cell(4, 8, 16, repeats=3), rollout_hopper.Cell(4, 8, 32, tail=True))
    step = {"requests": 4, "context": 8, "parts_ms": {"linear": 1.0}, "idle_ms": 0.0, "step_ms": 1.0}
    monkeypatch.setattr(rollout_hopper, "decode_trace", lambda engine, requests, context: step)
    monkeypatch.setattr(rollout_hopper, "prepare", lambda *_: None)
    pretend_engine(speeds={16: [100.0, 300.0, 200.0], 32: [50.0]})
    engine_of = rollout_hopper.Engine("qwen3-8b", "fp8_linear_kv", cells, forward="aligned", traced=(4, 8))
    rollout_hopper.measure(engine_of, tmp_path / "rows.json")
    return json.loads((tmp_path / "rows.json").read_text())


def test_rows_say_of_which_engine_they_are(stored_rows):
    assert [row["kind"] for row in stored_rows] == ["start", "rollout", "rollout", "decode_trace"]
    for row in stored_rows[1:]:
        engine = [row[name] for name in ("model", "precision", "layers", "forward", "decode_kernel", "batched_tokens")]
        assert engine == ["qwen3-8b", "fp8_linear_kv", 36, "aligned", "fp8_decode", 8192]
        assert row["command"].startswith("python benchmarks/rollout_hopper.py")
        assert len(row["commit"]) == 40
    assert [row["long_tailed"] for row in stored_rows[1:3]] == [False, True]


def test_rows_as_written_have_their_tables(stored_rows):
    assert "| 8,192 | 200 | not measured | 100, 300, 200 |" in rollout_table(stored_rows)
    assert len(run_table(stored_rows).splitlines()) == 2 + 4
    assert len(trace_tables(stored_rows)) == 1
