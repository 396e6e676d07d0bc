"""Weights written into a model's parameters and read back from them, against one tensor after another."""

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import Tensor

from fp8core.numerics.fingerprint import Slice, combine_sums, slice_sums
from fp8core.rollout import worker_policy
from fp8core.rollout.shared_weights import SharedBytes, TensorSpec
from fp8core.rollout.slots import Cut, Share, Slot, find_cuts
from fp8core.rollout.worker_policy import WeightPlaces


def apart(tensors: Mapping[str, Tensor]) -> SharedBytes:
    flat = [each.reshape(-1).view(torch.uint8) for each in tensors.values()]
    return SharedBytes(list(tensors), np.array([(i, 0, len(each)) for i, each in enumerate(flat)]), flat)


def side_by_side(tensors: Mapping[str, Tensor]) -> SharedBytes:
    """In one storage, after bytes that are nobody's."""
    names, places, storages = apart(tensors)
    sizes = places[:, 2]
    firsts = 16 + np.cumsum(sizes) - sizes
    buffer = torch.cat([torch.full((16,), 255, dtype=torch.uint8), *storages])
    return SharedBytes(names, np.stack([0 * sizes, firsts, sizes], axis=1), [buffer])


def backwards(tensors: Mapping[str, Tensor]) -> SharedBytes:
    """Side by side, no tensor before the one that it precedes in a parameter."""
    return side_by_side(dict(reversed(tensors.items())))


def model() -> dict[str, Tensor]:
    """q above k, experts below one another, a linear with columns of zeros, half of a vocabulary, half of columns."""
    return {
        "qk": torch.full((6, 8), 9.0),
        "experts": torch.full((2, 3, 4), 9.0).bfloat16(),
        "filled_up": torch.full((4, 6), 9.0),
        "vocabulary": torch.full((4, 2), 9.0),
        "columns": torch.full((3, 4), 9.0),
    }


SHARE: Share = {
    "q": (Slot("qk", 0, 4, 4, 8, 8), None),
    "k": (Slot("qk", 4, 6, 6, 8, 8), None),
    **{f"expert.{i}": (Slot("experts", 3 * i, 3 * i + 3, 3 * i + 3, 0, 0), None) for i in range(2)},
    "filled_up": (Slot("filled_up", 0, 3, 4, 5, 6), None),
    "vocabulary": (Slot("vocabulary", 0, 3, 3, 2, 2), Cut(0, 4, 3, 7, is_gathered=False)),
    "columns": (Slot("columns", 0, 3, 3, 4, 4), Cut(1, 4, 4, 8, is_gathered=True)),
}


def policy(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"q": (4, 8), "k": (2, 8), "expert.0": (3, 4), "expert.1": (3, 4)}
    shapes |= {"filled_up": (3, 5), "vocabulary": (7, 2), "columns": (3, 8)}
    found = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {name: tensor.bfloat16() if name.startswith("expert") else tensor for name, tensor in found.items()}


def gathered(rows: Tensor, axis: int) -> Tensor:
    """As if another GPU held the other half of the columns, all of them ones."""
    return torch.cat([torch.ones_like(rows), rows], dim=axis)


@pytest.mark.parametrize("shared", [apart, side_by_side, backwards])
@pytest.mark.parametrize("large", [0, 1 << 20])
def test_each_tensor_lies_in_its_rows_and_is_read_from_there(monkeypatch, shared, large: int) -> None:
    """Copied one by one or together, as their sizes say."""
    monkeypatch.setattr(worker_policy, "_LARGE_BYTES", large)
    parameters = model()
    held = WeightPlaces(parameters, SHARE)
    for seed in (1, 2):
        sent = policy(seed)
        held.clear_filling()
        held.write(parameters, shared(sent))
        assert torch.cat([sent["q"], sent["k"]]).equal(parameters["qk"])
        assert torch.stack([sent["expert.0"], sent["expert.1"]]).equal(parameters["experts"])
        zeros = torch.zeros(4, 6)
        zeros[:3, :5] = sent["filled_up"]
        assert zeros.equal(parameters["filled_up"])
        assert sent["vocabulary"][4:].equal(parameters["vocabulary"][:3])
        assert sent["columns"][:, 4:].equal(parameters["columns"])
        sums = held.sums(parameters, gathered)
        other = torch.cat([torch.ones(3, 4), sent["columns"][:, 4:]], dim=1)
        expected = {name: Slice.whole(tensor) for name, tensor in (sent | {"columns": other}).items()}
        expected["vocabulary"] = Slice(sent["vocabulary"][4:], 4 * 8, 7 * 8)
        assert (sums == slice_sums([expected[name] for name in SHARE])).all()


def test_neighbours_in_both_memories_are_copied_as_one(monkeypatch) -> None:
    copies, copy = list[list[int]](), torch._foreach_copy_
    monkeypatch.setattr(
        torch, "_foreach_copy_", lambda to, of: (copies.append([len(each) for each in to]), copy(to, of))
    )
    parameters = model()
    WeightPlaces(parameters, SHARE).write(parameters, side_by_side(policy(1)))
    q_and_k, both_experts, rows = 6 * 8 * 4, 2 * 3 * 4 * 2, 3 * 2 * 4
    assert copies == [[q_and_k, both_experts, rows]]


def test_a_policy_in_another_order_goes_to_the_same_places() -> None:
    parameters, sent = model(), policy(1)
    held = WeightPlaces(parameters, SHARE)
    held.write(parameters, side_by_side(policy(2)))
    held.write(parameters, backwards(sent))
    assert torch.cat([sent["q"], sent["k"]]).equal(parameters["qk"])
    held.write(parameters, apart({"k": policy(3)["k"]}))
    assert torch.cat([sent["q"], policy(3)["k"]]).equal(parameters["qk"])


@pytest.mark.parametrize(
    ("name", "shape", "ranks"),
    [
        # 64 rows for each of three GPUs: the second ends within them, the third has none.
        ("lm_head.weight", (70, 2), 3),
        # Two scales of FP32 are a word: a row of three ends within one.
        ("model.layers.0.self_attn.q_proj.weight_scale_inv", (4, 3), 4),
        ("model.layers.0.self_attn.o_proj.weight", (3, 8), 2),
    ],
)
@pytest.mark.parametrize("zeros", [0, 3])
def test_parts_on_several_gpus_are_read_as_the_whole_tensor(
    name: str, shape: tuple[int, int], ranks: int, zeros: int
) -> None:
    """Also from a parameter with columns of zeros."""
    whole, found = torch.randn(shape, generator=torch.Generator().manual_seed(0)), []
    cuts = [find_cuts({name: TensorSpec.of(whole)}, rank, ranks, 1)[name] for rank in range(ranks)]
    for cut in cuts:
        rows, columns = cut.of(whole).shape
        own = {name: torch.nn.functional.pad(cut.of(whole), (0, zeros)).contiguous()}
        held = WeightPlaces(own, {name: (Slot(name, 0, rows, rows, columns, columns + zeros), cut)})
        found.append(held.sums(own, lambda _, axis: torch.cat([each.of(whole) for each in cuts], axis)))
    # All of a tensor that they put together is read by each of them.
    sums = [[each] for each in found] if cuts[0].is_gathered else [found]
    assert [combine_sums(each) for each in sums] == len(sums) * [combine_sums([slice_sums([Slice.whole(whole)])])]


def test_sums_are_of_what_the_parameters_hold_now() -> None:
    parameters = model()
    held = WeightPlaces(parameters, SHARE)
    held.write(parameters, apart(policy(1)))
    before = held.sums(parameters, gathered)
    parameters["experts"].view(torch.int16)[1, 2, 3] ^= 1
    now = held.sums(parameters, gathered)
    assert [name for name, differs in zip(SHARE, (now != before).any(1), strict=True) if differs] == ["expert.1"]


def test_a_parameter_that_was_moved_is_found() -> None:
    """Captured graphs read its old memory, whatever the new one holds."""
    parameters = model()
    held = WeightPlaces(parameters, SHARE)
    held.write(parameters, apart(policy(1)))
    parameters["qk"] = parameters["qk"].clone()
    with pytest.raises(AssertionError, match="qk was moved"):
        held.sums(parameters, gathered)
    with pytest.raises(AssertionError, match="qk was moved"):
        held.write(parameters, apart(policy(1)))
