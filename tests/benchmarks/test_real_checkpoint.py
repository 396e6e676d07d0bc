"""A pretrained checkpoint from the package index: converted as it is, and trained in exact FP8."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from benchmarks.harness import ROOT
from benchmarks.real_checkpoint import TASKS, prepare, problems, questions, rounded, score, write_rounded
from fp8core.data.prompt import is_heldout
from fp8core.errors import UserError
from fp8core.models.checkpoint import load_checkpoint
from fp8core.models.gguf import convert_gguf
from fp8core.models.tokenizer import Tokenizer
from fp8core.models.weights import is_linear
from fp8core.numerics.e4m3 import quantise_tiles
from fp8core.numerics.recipe import POW2


def test_a_problem_is_solved_by_its_first_number() -> None:
    (question, answer), *_ = problems(1, 30)
    assert score(question, f" {answer}. And 99 more", f"#### {answer}", "length")
    assert not score(question, f" {answer + 1}, no, {answer}", f"#### {answer}", "length")
    assert not score(question, " many", f"#### {answer}", "stop")


@pytest.mark.parametrize("task", TASKS)
def test_a_task_has_different_questions_enough_held_out_and_is_solved_by_its_first_number(task: str) -> None:
    found = questions(task)
    assert len({text for text, _ in found}) == len(found)
    assert sum(is_heldout(text) for text, _ in found) >= 1024
    assert questions(task, 50) == found[:50]
    for text, answer in found:
        first, sign, second, third = re.findall(r"(\d+) ([*x+]) (\d+)(?: \+ (\d+))?[^.=]*=$", text)[0]
        found_first = int(first) + int(second) if sign == "+" else int(first) * int(second)
        assert found_first + int(third or 0) == answer
        assert score(text, f" {answer}.", f"#### {answer}", "length")


def test_another_rounding_moves_a_weight_by_up_to_half_a_step_of_its_tile() -> None:
    weights = torch.randn(200, 300, generator=torch.Generator().manual_seed(0)) * 0.02
    first, again, other = (rounded(weights, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    grid, scales = quantise_tiles(weights, POW2.weights)
    scales = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:200, :300]
    error, moved = grid * scales - weights, first - weights
    half = torch.maximum(grid.abs() * 2**-4, torch.full_like(grid, 2**-10)) * scales
    assert bool((moved.abs() <= half * 1.0001).all())
    # As large as the error of rounding, without a bias, and independent of it.
    assert float(moved.std() / error.std()) == pytest.approx(1, abs=0.05)
    assert abs(float(moved.mean())) < 0.01 * float(moved.std())
    assert abs(float((moved * error).mean())) < 0.02 * float(error.square().mean())


def test_a_rounded_checkpoint_differs_in_its_linears_alone(small_checkpoint: Path, tmp_path: Path) -> None:
    write_rounded(small_checkpoint, tmp_path / "rounded", 0)
    before, after = (load_checkpoint(folder).tensors for folder in (small_checkpoint, tmp_path / "rounded"))
    assert {name for name in before if not torch.equal(before[name], after[name])} == {*filter(is_linear, before)}


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
