import hashlib
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8core.config.data import ChainTaskConfig
from fp8core.data.chain import ALPHABET, EOS, OPERATIONS, ChainSource, running_values
from fp8core.data.prompt import is_heldout
from fp8core.errors import UserError
from fp8core.rewards.verifier import ChainVerifier

FIVE = ChainSource(ChainTaskConfig())
RAGGED = ChainSource(ChainTaskConfig(min_operands=2, max_operands=7))
WIDE = ChainSource(ChainTaskConfig(min_operands=2, max_operands=12, modulus=1000, operations="*-"))


@pytest.mark.parametrize(
    ("question", "values"),
    [("2*7*6+0+9=", "4,4,4,3"), ("07*45-03=", "15,12"), ("99*99=", "01"), ("999*999-002=", "001,999")],
)
def test_running_values(question: str, values: str) -> None:
    assert running_values(question) == values.split(",")


@pytest.mark.parametrize(("source", "digest"), [(FIVE, "164d23"), (RAGGED, "9e68b2")])
def test_the_stream_of_a_seed_stays(source: ChainSource, digest: str) -> None:
    """Recorded runs are made again from their seeds: other questions for a seed are another task."""
    rows = [row.question + row.completion for row in source.demonstrations(3, 300, 7, 0.45)]
    rows += [row.question + row.answer for row in (*source.training(5, 300, 2), *source.heldout(100))]
    assert hashlib.sha256("\n".join(rows).encode()).hexdigest()[:6] == digest


@settings(max_examples=30)
@given(step=st.integers(0, 10**9), count=st.integers(0, 70), seed=st.integers(0, 2**31 - 1))
def test_training_is_pure_and_never_held_out(step: int, count: int, seed: int) -> None:
    problems = RAGGED.training(step, count, seed)
    assert problems == ChainSource(ChainTaskConfig(min_operands=2, max_operands=7)).training(step, count, seed)
    assert len(problems) == count
    assert not any(is_heldout(problem.question) for problem in problems)
    assert all(problem.answer == running_values(problem.question)[-1] for problem in problems)


def test_heldout_is_fixed_different_and_a_prefix_of_more() -> None:
    problems = FIVE.heldout(256)
    assert len({problem.question for problem in problems}) == 256
    assert all(is_heldout(problem.question) for problem in problems)
    assert FIVE.heldout(64) == problems[:64]


def test_every_heldout_question_of_a_small_task_can_be_had() -> None:
    digits = "0123456789"
    every = [a + operation + b + "=" for a in digits for operation in OPERATIONS for b in digits]
    heldout = {question for question in every if is_heldout(question)}
    source = ChainSource(ChainTaskConfig(min_operands=2, max_operands=2))
    assert {problem.question for problem in source.heldout(len(heldout))} == heldout
    with pytest.raises(UserError, match=rf"evaluation\.prompts takes .* only {len(heldout)} held-out"):
        source.heldout(len(heldout) + 1)


@pytest.mark.parametrize("source", [RAGGED, WIDE])
def test_demonstrations_are_right_in_the_asked_styles(source: ChainSource) -> None:
    demonstrations = source.demonstrations(3, 4000, 1, 0.4)
    assert demonstrations == source.demonstrations(3, 4000, 1, 0.4)
    assert abs(sum(demo.style == "step_by_step" for demo in demonstrations) / 4000 - 0.4) < 0.03
    for demo in demonstrations:
        reference = running_values(demo.question)[-1]
        assert not is_heldout(demo.question)
        assert set(demo.question + demo.completion) <= set(ALPHABET)
        assert demo.completion.endswith(EOS)
        assert ("," in demo.completion) == (
            demo.style == "step_by_step" and len(re.findall("[-+*]", demo.question)) > 1
        )
        verdict = ChainVerifier().score(demo.question, demo.completion.removesuffix(EOS), reference, "stop")
        assert verdict.outcome == "right"
