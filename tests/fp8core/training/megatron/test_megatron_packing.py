"""Rows lie one after another; what is scored is the place before each completion token."""

import torch

from fp8core.rl.batch import TokenBatch
from fp8core.training.megatron.packing import Pass, pack, packs


def batch(experts=None):
    return TokenBatch.of([[1, 2, 3], [4], [5, 6]], [[7, 8], [9], [10, 11, 12]], experts)


def test_a_pack_holds_rows_without_padding_between_them():
    found = pack(batch(), slice(0, 3), multiple=8)
    assert found.tokens.tolist() == [1, 2, 3, 7, 8, 4, 9, 5, 6, 10, 11, 12, 0, 0, 0, 0]
    assert found.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 0, 1, 2, 3, 4, 0, 0, 0, 0]
    assert found.bounds.tolist() == [0, 5, 7, 12, 16]
    assert found.bounds.dtype == torch.int32
    assert (found.longest, found.used) == (5, 12)
    assert found.before.tolist() == [2, 3, 5, 8, 9, 10]
    assert found.written.tolist() == [7, 8, 9, 10, 11, 12]
    assert found.valid.tolist() == [[True] * 12 + [False] * 4]


def test_a_pass_that_does_not_count_has_no_valid_token():
    found = pack(batch(), slice(0, 3), multiple=8)
    assert torch.equal(Pass(found, counts=True).valid, found.valid)
    assert not Pass(found, counts=False).valid.any()


def test_a_full_pack_has_no_sequence_of_padding():
    assert pack(batch(), slice(0, 3), multiple=12).bounds.tolist() == [0, 5, 7, 12]


def test_rows_are_taken_in_order_up_to_the_limit_and_a_long_one_is_alone():
    assert [found.rows for found in packs(batch(), limit=7, multiple=1)] == [slice(0, 2), slice(2, 3)]
    assert [found.rows for found in packs(batch(), limit=4, multiple=1)] == [slice(0, 1), slice(1, 2), slice(2, 3)]
    assert [found.rows for found in packs(batch(), limit=12, multiple=1)] == [slice(0, 3)]


def test_routes_lie_beside_their_tokens_and_padding_has_none():
    routes = [[[[row, place]] for place in range(length)] for row, length in enumerate((5, 2, 5))]
    found = pack(batch([torch.tensor(row, dtype=torch.int16) for row in routes]), slice(1, 3), multiple=8)
    assert found.experts is not None
    expected = [[1, 0], [1, 1], *([2, place] for place in range(5)), [-1, -1]]
    assert found.experts[:, 0].tolist() == expected
