"""What happens around timed rollouts; the timing itself needs a Hopper GPU."""

import sys

import pytest

from benchmarks import rollout_hopper


def test_engines_after_the_budget_are_not_started(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rollout_hopper.subprocess, "Popen", lambda *_, **__: pytest.fail("started"))
    names = ["qwen3-8b/bf16/long", "llama-3.1-8b/bf16"]
    monkeypatch.setattr(sys, "argv", ["rollout_hopper.py", *names, f"--out={tmp_path}", "--seconds=0"])
    rollout_hopper.main()
    assert capsys.readouterr().out.splitlines() == [f"{name}: not started, the time is used up" for name in names]
