"""What happens around timed rollouts; the timing itself needs a Hopper GPU."""

import json
import subprocess
import sys

import pytest

from benchmarks import rollout_hopper


def test_engines_after_the_budget_are_not_started(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rollout_hopper, "start", lambda *_: pytest.fail("started"))
    names = ["qwen3-8b/bf16/long", "llama-3.1-8b/bf16"]
    monkeypatch.setattr(sys, "argv", ["rollout_hopper.py", *names, f"--out={tmp_path}", "--seconds=0"])
    rollout_hopper.main()
    assert capsys.readouterr().out.splitlines() == [f"{name}: not started, the time is used up" for name in names]


def test_an_earlier_result_is_not_taken_for_that_of_an_engine_that_failed(tmp_path, monkeypatch):
    result = tmp_path / "llama-3.1-8b-bf16.json"
    result.write_text("[]")
    ended = subprocess.Popen(["true"])
    monkeypatch.setattr(rollout_hopper, "start", lambda *_: ended)
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
    monkeypatch.setattr(rollout_hopper.cases, "compile_products", lambda *_: None)
    pretend_engine(speeds={16: [100.0, 300.0, 200.0], 32: [50.0]})
    engine_of = rollout_hopper.Engine("qwen3-8b", "fp8_linear_kv", cells, forward="aligned", traced=(4, 8))
    rollout_hopper.measure(engine_of, tmp_path / "rows.json")
    return json.loads((tmp_path / "rows.json").read_text())


def test_rows_say_of_which_engine_they_are(stored_rows):
    assert [row["kind"] for row in stored_rows] == ["start", "rollout", "rollout", "decode_trace"]
    for row in stored_rows[1:]:
        engine = [row[name] for name in ("model", "precision", "layers", "forward", "decode_kernel", "batched_tokens")]
        assert engine == ["qwen3-8b", "fp8_linear_kv", 36, "aligned", "fp8_decode", 8192]
        assert row["command"]
        assert len(row["commit"]) == 40
    assert [row["long_tailed"] for row in stored_rows[1:3]] == [False, True]


# A traced decode step, from launches whose parts are known

NAMES = [
    "decode_attention",
    "void deep_gemm::sm90_fp8_gemm",
    "per_token_group_quant_8bit_kernel",
    "_gumbel_sample_kernel",
]
STEP = ((0, 3_000_000), (2, 200_000), (1, 1_000_000), (3, 500_000))  # name and length; 100 us between launches
PAUSE = 100_000


def launches(steps: int) -> list[tuple[int, int, int]]:
    found, now = [], 0
    for name, length in STEP * steps:
        found.append((name, now, length))
        now += length + PAUSE
    return found


def test_parts_and_pauses_add_up_to_the_step() -> None:
    row = rollout_hopper.step_parts(NAMES, launches(steps=9))
    assert row["steps"] == 5, "the first two steps and the last two are left out"
    assert row["parts_ms"] == {"attention": 3.0, "linear": 1.0, "quantise": 0.2, "sampler": 0.5}
    assert row["idle_ms"] == 0.4
    assert row["step_ms"] == pytest.approx(sum(row["parts_ms"].values()) + row["idle_ms"])
    assert row["launches"] == 4
