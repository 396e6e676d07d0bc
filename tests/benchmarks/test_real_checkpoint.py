"""A pretrained checkpoint from the package index: converted as it is, and trained in exact FP8."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from benchmarks.harness import ROOT
from benchmarks.real_checkpoint import prepare, problems, score
from fp8core.errors import UserError
from fp8core.models.gguf import convert_gguf
from fp8core.models.tokenizer import Tokenizer


def test_a_problem_is_solved_by_its_first_number() -> None:
    (question, answer), *_ = problems(1, 30)
    assert score(question, f" {answer}. And 99 more", f"#### {answer}", "length")
    assert not score(question, f" {answer + 1}, no, {answer}", f"#### {answer}", "length")
    assert not score(question, " many", f"#### {answer}", "stop")


@pytest.mark.parametrize(("content", "fault"), [(b"PK\x03\x04", "not a GGUF file"), (b"GGUF", "cannot read it")])
def test_other_files_are_refused_and_nothing_is_written(content: bytes, fault: str, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(UserError, match=fault):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "target")
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


@pytest.mark.slow
def test_smollm2_is_converted_and_trained_without_any_mismatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "build" / "real"
    prepare(folder)
    question, _answer = next(problems(1, 30))
    tokens = AutoTokenizer.from_pretrained(folder / "model")(question)["input_ids"]
    assert Tokenizer.load(folder / "model").encode(question) == tokens
    # A thread of its own would wait for the other core, which runs another test.
    settings = ["steps=1", "threads=1", "rollout.prompts_per_step=2", "evaluation.prompts=4", "checkpoint.every=9"]
    command = [sys.executable, "-m", "flows.cli", "run", "real", *(word for s in settings for word in ("--set", s))]
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    subprocess.run(command, check=True, timeout=900)
    (summary,) = (json.loads(path.read_text()) for path in tmp_path.glob("runs/*/summary.json"))
    assert (summary["steps"], summary["tmpe_max"], summary["tokens_differing"]) == (1, 1.0, 0)
    assert 0 < summary["heldout_first"] <= 1
