"""The cache against a slow model of it, and against a pass over the whole sequence."""

import pytest
import torch

from fp8core.models.decoder import FullContext
from fp8core.rollout.kv_cache import KvCache

VALID = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 1]], dtype=torch.bool)
LAYERS, HEADS, DIM = 2, 2, 3


def kv(rows, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, rows, HEADS, columns, DIM, generator=generator, dtype=torch.float64).unbind()


def slow_mask(valid, queries, columns):
    """Row by row: a query sees valid columns up to its own, and its own always."""
    padded = [row + [True] * (columns - len(row)) for row in valid.tolist()]
    return torch.tensor([[[(k <= q and row[k]) or k == q for k in range(columns)] for q in queries] for row in padded])[
        :, None
    ]


def test_masks_of_a_prompt_and_of_the_tokens_after_it():
    cache = KvCache(VALID, capacity=7, num_layers=LAYERS)
    cache.begin(4)
    assert torch.equal(cache.mask, slow_mask(VALID, range(4), 4))
    for columns in (5, 6, 7):
        cache.begin(1)
        assert torch.equal(cache.mask, slow_mask(VALID, [columns - 1], columns))


def test_what_is_stored_is_returned_in_order():
    cache = KvCache(VALID, capacity=6, num_layers=LAYERS)
    keys, values = ([torch.empty(3, HEADS, 0, DIM, dtype=torch.float64)] * LAYERS for _ in range(2))
    for call, length in enumerate((4, 1, 1)):
        cache.begin(length)
        for layer in range(LAYERS):
            k, v = kv(3, length, seed=10 * call + layer)
            keys[layer], values[layer] = torch.cat([keys[layer], k], 2), torch.cat([values[layer], v], 2)
            found = cache.extend(layer, k, v)
            assert torch.equal(found[0], keys[layer])
            assert torch.equal(found[1], values[layer])


@pytest.mark.parametrize("rows", [[0, 1, 2], [2, 0], [1], [0, 0, 1, 2, 2]])
def test_rows_are_kept_or_repeated(rows):
    cache = KvCache(VALID, capacity=6, num_layers=LAYERS)
    cache.begin(4)
    first = [kv(3, 4, seed=layer) for layer in range(LAYERS)]
    for layer in range(LAYERS):
        cache.extend(layer, *first[layer])
    cache.select(torch.tensor(rows))
    cache.begin(1)
    assert torch.equal(cache.mask, slow_mask(VALID[rows], [4], 5))
    for layer in range(LAYERS):
        k, v = kv(len(rows), 1, seed=50 + layer)
        keys, values = cache.extend(layer, k, v)
        assert torch.equal(keys, torch.cat([first[layer][0][rows], k], 2))
        assert torch.equal(values, torch.cat([first[layer][1][rows], v], 2))


def test_repeated_rows_go_their_own_ways():
    cache = KvCache(VALID[1:2], capacity=5, num_layers=1)
    cache.begin(4)
    cache.extend(0, *kv(1, 4, seed=0))
    cache.select(torch.tensor([0, 0]))
    cache.begin(1)
    k, v = kv(2, 1, seed=1)
    keys, _ = cache.extend(0, k, v)
    assert not torch.equal(keys[0], keys[1])
    assert torch.equal(keys[0, :, :4], keys[1, :, :4])


def test_a_prompt_without_padding_is_seen_as_in_a_full_pass():
    cache = KvCache(VALID[1:2], capacity=6, num_layers=1)
    cache.begin(4)
    full = FullContext.of(torch.ones(1, 6, dtype=torch.bool)).mask
    assert torch.equal(cache.mask, full[:, :, :4, :4])
    cache.begin(1)
    cache.begin(1)
    assert torch.equal(cache.mask, full[:, :, 5:])
