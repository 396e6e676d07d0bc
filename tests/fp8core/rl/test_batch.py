from dataclasses import replace

import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8core.rl.batch import RolloutBatch, TokenBatch, pad, pad_column, routes, routes_column

IDS = st.lists(st.integers(0, 1000), min_size=1, max_size=6)
ROWS = st.lists(st.tuples(IDS, IDS), min_size=1, max_size=7)


@given(ROWS)
def test_prompts_and_completions_are_joined_and_padded_on_the_right(rows):
    batch = TokenBatch.of([prompt for prompt, _ in rows], [completion for _, completion in rows])
    width = max(len(prompt) + len(completion) for prompt, completion in rows)
    assert (
        batch.tokens.shape
        == batch.valid.shape
        == batch.response_mask.shape
        == batch.positions.shape
        == (len(rows), width)
    )
    assert batch.tokens.dtype == batch.positions.dtype == torch.int64
    assert len(batch) == len(rows)
    for i, (prompt, completion) in enumerate(rows):
        whole = prompt + completion
        padding = width - len(whole)
        assert batch.tokens[i].tolist() == whole + [0] * padding
        assert batch.valid[i].tolist() == [True] * len(whole) + [False] * padding
        assert batch.response_mask[i].tolist() == [False] * len(prompt) + [True] * len(completion) + [False] * padding
        assert batch.positions[i].tolist() == list(range(len(whole))) + [0] * padding


@given(ROWS, st.integers(1, 8))
def test_slices_cover_the_batch_and_are_trimmed(rows, size):
    prompts, completions = zip(*rows, strict=True)
    batch = TokenBatch.of(prompts, completions)
    found = list(batch.slices(size))
    assert [i for rows_, _ in found for i in range(len(rows))[rows_]] == list(range(len(rows)))
    for rows_, part in found:
        alone = TokenBatch.of(prompts[rows_], completions[rows_])
        assert len(part) <= size
        for name in ("tokens", "valid", "response_mask"):
            assert torch.equal(getattr(part, name), getattr(alone, name)), name


def test_experts_are_padded_with_what_the_router_is_to_choose():
    first, second = [[[0, 1]], [[2, 3]]], [[[4, 5]], [[6, 7]], [[8, 9]], [[1, 3]]]
    recorded = [torch.tensor(row, dtype=torch.int16) for row in (first, second)]
    batch = TokenBatch.of([[5], [6, 7]], [[8, 9], [3, 4, 5]], recorded)
    assert batch.experts is not None
    assert batch.experts.shape == (2, 5, 1, 2)
    free = [[-1, -1]]
    assert batch.experts.tolist() == [[*first, free, free, free], [*second, free]]
    (_, part), (_, other) = batch.slices(1)
    assert part.experts is not None
    assert other.experts is not None
    assert part.experts.tolist() == [[*first, free]]
    assert other.experts.tolist() == [[*second, free]]
    assert TokenBatch.of([[5]], [[8]]).part(slice(0, 1)).experts is None


ELEMENTS = {
    "int32": (pa.int32(), st.integers(-(2**31), 2**31 - 1), torch.int64),
    "float32": (pa.float32(), st.floats(-100, 0, width=32), torch.float64),
    "bool": (pa.bool_(), st.booleans(), torch.bool),
}


@pytest.mark.parametrize("name", ELEMENTS)
@given(data=st.data())
def test_a_column_is_padded_as_its_rows_are(name, data):
    element, values, dtype = ELEMENTS[name]
    chunks = data.draw(st.lists(st.lists(st.lists(values, max_size=5), max_size=4), max_size=3))
    column = pa.chunked_array([pa.array(rows, pa.list_(element)) for rows in chunks], pa.list_(element))
    found, expected = pad_column(column, dtype, 1), pad(column.to_pylist(), dtype, 1)
    assert found.dtype == expected.dtype == dtype
    assert found.shape == expected.shape
    assert torch.equal(found, expected)


def test_the_fresh_mask_has_no_stale_tokens():
    mask = torch.tensor([[True, True, False], [True, True, True]])
    nothing = TokenBatch(*(torch.zeros(2, 1) for _ in range(3)))
    batch = RolloutBatch(nothing, mask, torch.zeros(2, 3), None, None, torch.zeros(2), torch.ones(2, dtype=torch.bool))
    assert torch.equal(batch.fresh_mask, mask)
    stale = replace(batch, stale_mask=torch.tensor([[True, False, False], [False, True, False]]))
    assert stale.fresh_mask.tolist() == [[False, True, False], [True, False, True]]
    assert stale.rows(slice(1, 2)).fresh_mask.tolist() == [[True, False, True]]


@given(lengths=st.lists(st.integers(1, 4), min_size=1, max_size=4), layers=st.integers(1, 3), k=st.integers(1, 3))
def test_experts_come_back_as_they_were_stored(lengths, layers, k):
    """Through one piece of memory too, where a row begins in the middle."""
    rows = [torch.randint(0, 128, (length, layers, k), dtype=torch.int16) for length in lengths]
    stored = routes_column(rows)
    assert stored.to_pylist() == [row.tolist() for row in rows]
    for read in (stored, pa.chunked_array([stored.combine_chunks()])):
        found = routes(read)
        assert len(found) == len(rows)
        assert all(torch.equal(a, b) and a.dtype == torch.int16 for a, b in zip(found, rows, strict=True))
