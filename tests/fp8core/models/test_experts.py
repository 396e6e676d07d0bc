from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8core.models.experts import (
    ExpertWeights,
    MlpFormats,
    MlpWeights,
    RecordedRouting,
    ReplayedRouting,
    TopKRouting,
    feed_forward,
    gate_weights,
    mix,
    mlp,
    router_logits,
    top_k,
)
from fp8core.numerics.e4m3 import encode, quantise_tiles
from fp8core.numerics.elementwise import FUSED, KERNELS, NATIVE, NOWHERE, STEPWISE, keep_fp32, round_to_bf16
from fp8core.numerics.linear import Bf16Linear, Fp8BlockLinear, Fp32Linear, StoredWeight, load_weight
from fp8core.numerics.logprobs import load_head
from fp8core.numerics.recipe import FP32, POW2

FORMATS = {
    "fp8": MlpFormats(Fp8BlockLinear(POW2), round_to_bf16, STEPWISE),
    "fp8, fp32 scales": MlpFormats(Fp8BlockLinear(FP32), round_to_bf16, STEPWISE),
    "bf16": MlpFormats(Bf16Linear(), round_to_bf16, STEPWISE),
}
HIDDEN, WIDTH, COUNT = 144, 72, 5


def normal(*shape, seed, spread=1.0):
    return (spread * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).bfloat16().float()


def linear(form, *weights):
    if form == "bf16":
        return load_weight([StoredWeight(weight.bfloat16()) for weight in weights])
    tiles = [quantise_tiles(weight, (FP32 if "fp32" in form else POW2).weights) for weight in weights]
    return load_weight([StoredWeight(encode(grid), scales) for grid, scales in tiles])


def layer_of(form, per_token=2, normalise_top_k=True):
    experts = tuple(
        MlpWeights(
            gate_up=linear(form, *(normal(WIDTH, HIDDEN, seed=3 * e + i, spread=HIDDEN**-0.5) for i in range(2))),
            down=linear(form, normal(HIDDEN, WIDTH, seed=3 * e + 2, spread=WIDTH**-0.5)),
        )
        for e in range(COUNT)
    )
    router = load_head(normal(COUNT, HIDDEN, seed=99, spread=HIDDEN**-0.5))
    return ExpertWeights(router, experts, per_token, normalise_top_k)


@given(
    st.lists(st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0]), min_size=6, max_size=6), min_size=1), st.integers(1, 6)
)
def test_the_largest_logits_win_and_of_equal_ones_the_lower_index(rows, k):
    for row, chosen in zip(rows, top_k(torch.tensor(rows), k).tolist(), strict=True):
        assert chosen == sorted(sorted(range(6), key=lambda e: (-row[e], e))[:k])


@pytest.mark.parametrize("per_token", [1, 3, COUNT])
def test_gate_weights_are_a_softmax(per_token):
    logits = normal(50, COUNT, seed=0, spread=4)
    chosen = top_k(logits, per_token)
    plain = logits.double().softmax(-1).gather(-1, chosen)
    assert torch.allclose(gate_weights(logits, chosen, normalise_top_k=False).double(), plain, rtol=1e-6, atol=1e-9)
    normalised = gate_weights(logits, chosen, normalise_top_k=True)
    assert torch.allclose(normalised.double(), plain / plain.sum(-1, keepdim=True), rtol=1e-6, atol=1e-9)
    assert normalised.dtype == torch.float32


def test_router_logits_are_those_of_fp64_and_of_any_batch():
    x, router = normal(300, 2048, seed=0), load_head(normal(64, 2048, seed=1))
    logits = router_logits(x, router)
    assert logits.dtype == torch.float32
    assert torch.allclose(logits.double(), x.double() @ router.values.double().t(), atol=2e-3)
    for rows in (*torch.arange(3).split(1), torch.arange(40, 47), torch.randperm(300)):
        assert torch.equal(router_logits(x[rows], router), logits[rows])


@pytest.mark.parametrize(("points", "gates_in_bf16"), [(NATIVE, True), (KERNELS, False), (FUSED, False)])
def test_where_vllm_rounds_logits_experts_are_chosen_and_weighted_by_rounded_ones(points, gates_in_bf16):
    """The exact logits would send some of these tokens elsewhere; silu is rounded in experts, compiled or not."""
    weights, x = layer_of("bf16"), normal(4000, HIDDEN, seed=8)
    forms, routing = MlpFormats(Bf16Linear(), round_to_bf16, points), RecordedRouting()
    found = feed_forward(x, weights, forms, 0, routing)
    exact = router_logits(x, weights.router)
    rounded = exact.bfloat16().float()
    chosen = top_k(rounded, 2)
    assert torch.equal(routing.recorded(1)[0, :, 0], chosen)
    assert not torch.equal(chosen, top_k(exact, 2))
    gates = gate_weights(rounded, chosen, True)
    gates = gates.bfloat16().float() if gates_in_bf16 else gates
    assert torch.equal(found, mix(x, weights.experts, FORMATS["bf16"], chosen, gates))


@pytest.mark.parametrize("normalise_top_k", [True, False])
@pytest.mark.parametrize("form", FORMATS)
def test_the_layer_is_a_sum_over_each_tokens_experts(form, normalise_top_k):
    """Token by token, expert by expert, without any grouping: bit for bit."""
    weights, x = layer_of(form, 3, normalise_top_k), normal(40, HIDDEN, seed=7)
    found = feed_forward(x, weights, FORMATS[form], 0, TopKRouting())
    for t in range(len(x)):
        token = x[t : t + 1]
        logits = router_logits(token, weights.router)
        (chosen,) = top_k(logits, 3).tolist()
        (gates,) = gate_weights(logits, torch.tensor([chosen]), normalise_top_k).double()
        total = torch.zeros(1, HIDDEN, dtype=torch.float64)
        for gate, e in zip(gates, chosen, strict=True):
            total += gate * mlp(token, weights.experts[e], FORMATS[form], round_to_bf16).double()
        assert torch.equal(found[t : t + 1], total.to(torch.bfloat16).float()), t


def test_gradients_reach_the_router_through_the_gates_of_a_replayed_choice():
    """Against autograd through the textbook formula in FP64, with experts that the router would not choose."""
    names = [
        (normal(2 * WIDTH, HIDDEN, seed=e, spread=0.1), normal(HIDDEN, WIDTH, seed=9 + e, spread=0.1)) for e in range(3)
    ]
    masters = [tensor.requires_grad_() for pair in names for tensor in pair]
    gate = normal(3, HIDDEN, seed=30, spread=0.1).requires_grad_()
    x = normal(6, HIDDEN, seed=31).requires_grad_()
    experts = tuple(
        MlpWeights(
            *(
                replace(load_weight([StoredWeight(master.detach())]), master=master)
                for master in masters[2 * e : 2 * e + 2]
            )
        )
        for e in range(3)
    )
    layer = ExpertWeights(replace(load_head(gate.detach()), master=gate), experts, 2, normalise_top_k=True)
    worst = top_k(-router_logits(x, layer.router).detach(), 2)
    assert not torch.equal(worst, top_k(router_logits(x, layer.router), 2))
    replay = ReplayedRouting(worst[None, :, None])
    formats = MlpFormats(Fp32Linear(), keep_fp32, NOWHERE)
    slope = normal(6, HIDDEN, seed=32)
    found = torch.autograd.grad((feed_forward(x, layer, formats, 0, replay) * slope).sum(), [x, gate, *masters])

    wide = [tensor.detach().double().requires_grad_() for tensor in (x, gate, *masters)]
    tokens, router, *parts = wide
    gates = (tokens @ router.t()).gather(1, worst).softmax(-1)
    outputs = []
    for up, down in zip(parts[::2], parts[1::2], strict=True):
        first, second = (tokens @ up.t()).chunk(2, dim=-1)
        outputs.append((torch.nn.functional.silu(first) * second) @ down.t())
    mixed = (torch.stack(outputs, 1).gather(1, worst[..., None].expand(-1, -1, HIDDEN)) * gates[..., None]).sum(1)
    expected = torch.autograd.grad((mixed * slope.double()).sum(), wide)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()
        assert theirs.norm() > 0


def test_a_replay_leaves_unrecorded_positions_to_the_router():
    logits = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    replay = ReplayedRouting(torch.tensor([[[[1, 2]], [[-1, -1]]]]))
    assert replay.choose(0, logits, 2).tolist() == [[1, 2], [0, 1]]
    with pytest.raises(AssertionError, match="another shape"):
        replay.choose(0, logits, 3)
    with pytest.raises(AssertionError, match="does not exist"):
        replay.choose(0, logits[:, :2], 2)
