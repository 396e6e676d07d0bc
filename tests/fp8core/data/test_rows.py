from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8core.data.prompt import Problem, is_heldout, problem
from fp8core.data.rows import RowSource, problem_from_row
from fp8core.errors import UserError


def numbered(count: int) -> list[Problem]:
    return [problem(f"question {index}", f"#### {index}") for index in range(count)]


@settings(max_examples=60)
@given(rows=st.integers(1, 40), count=st.integers(1, 40), seed=st.integers(0, 5), data=st.data())
def test_every_epoch_holds_each_row_once_across_steps(rows: int, count: int, seed: int, data: st.DataObject) -> None:
    count = min(count, rows)
    source = RowSource(numbered(rows), "rows", heldout=[])
    epochs = 3
    stream = [row for step in range(epochs * rows // count + 1) for row in source.training(step, count, seed)]
    for epoch in range(epochs):
        assert Counter(stream[epoch * rows : (epoch + 1) * rows]) == Counter(numbered(rows))
    step = data.draw(st.integers(0, epochs * rows // count))
    again = RowSource(numbered(rows), "rows", heldout=[])
    assert again.training(step, count, seed) == stream[step * count : (step + 1) * count]


def test_epochs_and_seeds_order_differently() -> None:
    source = RowSource(numbered(100), "rows", heldout=[])
    orders = [tuple(source.training(epoch, 100, seed)) for epoch in (0, 1) for seed in (0, 1)]
    assert len(set(orders)) == 4
    assert tuple(numbered(100)) not in orders


def test_one_row_in_eight_is_held_out_and_never_trained_on() -> None:
    source = RowSource(numbered(400), "rows")
    held = [row for row in numbered(400) if is_heldout(row.question)]
    assert set(source.heldout(len(held))) == set(held)
    trained = source.training(0, 400 - len(held), 0)
    assert set(trained) | set(held) == set(numbered(400))
    assert not set(trained) & set(held)


def test_heldout_does_not_depend_on_the_order_of_rows() -> None:
    assert RowSource(numbered(400), "rows").heldout(20) == RowSource(numbered(400)[::-1], "rows").heldout(20)


def test_separate_heldout_rows_are_taken_out_of_training() -> None:
    heldout = [*numbered(5), problem("elsewhere", "#### 1")]
    source = RowSource(numbered(20), "rows", heldout)
    assert set(source.heldout(6)) == set(heldout)
    assert set(source.training(0, 15, 0)) == set(numbered(20)[5:])


def test_repeated_questions_are_kept_once_with_the_first_answer() -> None:
    source = RowSource([*numbered(10), problem("question 3", "another")], "rows", heldout=[])
    assert set(source.training(0, 10, 0)) == set(numbered(10))
    with pytest.raises(UserError, match="rows: a step takes 11 prompts, but there are only 10 training rows"):
        source.training(0, 11, 0)


def test_too_few_rows() -> None:
    with pytest.raises(UserError, match=r"rows: evaluation\.prompts=50, but there are only \d held-out rows"):
        RowSource(numbered(40), "rows").heldout(50)
    with pytest.raises(UserError, match="rows: all 3 questions are held out, none is left"):
        RowSource(numbered(3), "rows", numbered(3))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([1], "here: the row is list, not an object"),
        ({"question": "q"}, r"here: no field 'answer' \(the row has: 'question'\)"),
        ({}, r"here: no field 'question' \(the row has: none\)"),
        ({"question": "q", "answer": 7}, "here: field 'answer' is int, not text"),
        ({"question": None, "answer": "7"}, "here: field 'question' is NoneType, not text"),
        ({"question": " \n", "answer": "7"}, "here: field 'question' is empty"),
        ({"question": "q", "answer": ""}, "here: field 'answer' is empty"),
        ({"question": "q\ud800", "answer": "7"}, "here: field 'question' holds half a surrogate pair"),
    ],
)
def test_bad_rows_are_refused_with_their_place(row: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        problem_from_row(row, "question", "answer", "here")


def test_every_row_is_checked_once_with_its_place() -> None:
    rows = [problem_from_row({"q": f"{n % 5}", "a": "1"}, "q", "a", f"rows:{n}") for n in range(8)]
    elsewhere = [problem_from_row({"q": f"{n}", "a": "1"}, "q", "a", f"held:{n}") for n in (4, 9)]
    source = RowSource(rows, "rows", elsewhere)
    assert [row.place for row in source.to_check()] == [*(f"rows:{n}" for n in range(5)), "held:9"]


def test_the_training_set_is_what_is_left_to_train_on() -> None:
    source = RowSource(numbered(400), "rows")
    trained = {row for step in range(40) for row in source.training(step, 10, 0)}
    assert source.training_set().rows == len(trained)
    assert source.training_set() == RowSource(numbered(400), "elsewhere").training_set()
    answered_differently = [*numbered(399), problem("question 399", "#### 0")]
    assert not is_heldout("question 399")
    assert source.training_set().digest != RowSource(answered_differently, "rows").training_set().digest
