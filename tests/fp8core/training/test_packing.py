"""Rows lie one after another, and every completion token is found again."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8core.rl.batch import TokenBatch
from fp8core.training.packing import even_groups, packs, row_groups


def batch(experts=None):
    return TokenBatch.of([[1, 2, 3], [4], [5, 6]], [[7, 8], [9], [10, 11, 12]], experts)


def packed(multiple, experts=None, micro_batch_tokens=100):
    return list(packs(batch(experts), micro_batch_tokens, multiple))


def test_a_pack_holds_rows_without_padding_between_them():
    (found,) = packed(multiple=8)
    assert found.tokens.tolist() == [1, 2, 3, 7, 8, 4, 9, 5, 6, 10, 11, 12, 0, 0, 0, 0]
    assert found.sequences.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 0, 1, 2, 3, 4, 0, 0, 0, 0]
    assert found.sequences.starts == (0, 5, 7, 12, 16)
    assert found.sequences.longest == 5
    assert (found.target_positions - 1).tolist() == [2, 3, 5, 8, 9, 10]
    assert found.tokens[found.target_positions].tolist() == [7, 8, 9, 10, 11, 12]


@pytest.mark.parametrize(
    ("micro_batch_tokens", "rows"),
    [(7, [slice(0, 2), slice(2, 3)]), (4, [slice(0, 1), slice(1, 2), slice(2, 3)]), (12, [slice(0, 3)])],
)
def test_rows_are_taken_in_order_up_to_the_budget_and_a_long_one_is_alone(micro_batch_tokens, rows):
    assert list(row_groups([5, 2, 5], micro_batch_tokens)) == rows
    assert [found.rows for found in packed(1, micro_batch_tokens=micro_batch_tokens)] == rows


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(1, 64), st.integers(1, 8))
def test_groups_of_several_ranks_are_no_more_a_rank_and_as_small_as_they_can_be(lengths, most, ranks):
    plain, even = list(row_groups(lengths, most)), even_groups(lengths, most, ranks)
    assert [row for rows in even for row in range(len(lengths))[rows]] == list(range(len(lengths)))
    assert math.ceil(len(even) / ranks) == math.ceil(len(plain) / ranks)
    if ranks == 1 or len(plain) % ranks == 0:
        assert even == plain

    def largest(groups):
        return max((sum(lengths[rows]) for rows in groups), default=0)

    assert largest(even) <= max([most, *lengths])
    if len(plain) % ranks:
        fewest = [size for size in range(1, most) if len(list(row_groups(lengths, size))) <= len(even)]
        assert even == list(row_groups(lengths, min(fewest, default=most))), "no smaller size makes as few"
