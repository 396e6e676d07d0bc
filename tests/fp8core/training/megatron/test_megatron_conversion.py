"""Weights survive the way to every GPU's share and back, byte for byte; no process group takes part."""

from collections import Counter

import pytest
import torch
from megatron_cases import FAMILIES
from pretended_gpu import LOCAL

from fp8core.config.precision import PrecisionContract
from fp8core.config.training import MegatronConfig
from fp8core.models.families import parameter_shapes
from fp8core.models.weights import rollout_formats, stored_weights
from fp8core.numerics.recipe import FP32
from fp8core.training.megatron.conversion import (
    TRANSFORMER_ENGINE,
    ParallelRank,
    parallel_ranks,
    policy_of,
    senders,
    share,
)

GRIDS = {"one": {}, "tensor": {"tensor_parallel": 2}}


def shares_of(arch, megatron, style, policy):
    return {rank: share(arch, megatron, style, rank, policy) for rank in parallel_ranks(megatron)}


@pytest.mark.parametrize("parts", GRIDS.values(), ids=GRIDS)
@pytest.mark.parametrize("style", [LOCAL, TRANSFORMER_ENGINE], ids=["local", "transformer_engine"])
def test_a_round_trip_gives_the_same_bytes(family, masters_of, style, parts):
    policy = masters_of(family)
    megatron = MegatronConfig(**parts, **({"expert_parallel": 2} if family.experts else {}))
    again = policy_of(family, megatron, style, shares_of(family, megatron, style, policy))
    assert again.keys() == policy.keys() == parameter_shapes(family).keys()
    assert all(torch.equal(again[name], policy[name]) for name in policy)


def test_a_grid_in_which_ranks_of_experts_are_ranks_of_the_tensor_group(architecture, masters_of):
    arch = architecture(**FAMILIES["moe"])
    megatron = MegatronConfig(tensor_parallel=2, sequence_parallel=True, expert_parallel=2)
    policy = masters_of(arch)
    shares = {rank: share(arch, megatron, LOCAL, rank, policy) for rank in (ParallelRank(0, 0), ParallelRank(1, 1))}
    again = policy_of(arch, megatron, LOCAL, shares)
    assert again.keys() == policy.keys()
    assert all(torch.equal(again[name], policy[name]) for name in policy)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_fp8_export_is_that_of_the_hugging_face_layout(architecture, masters_of, head_dim):
    """With heads of 64 a 128-row tile of the interleaved weight mixes K with V: quantising there gives other scales."""
    arch = architecture(hidden_size=256, num_heads=4, num_kv_heads=2, head_dim=head_dim, intermediate_size=256)
    policy, names = masters_of(arch), rollout_formats(PrecisionContract(), arch.num_layers).stored_names()
    megatron = MegatronConfig(tensor_parallel=2)
    back = policy_of(arch, megatron, LOCAL, shares_of(arch, megatron, LOCAL, policy))
    expected, found = (stored_weights(weights, names, FP32.weights) for weights in (policy, back))
    assert all(torch.equal(found[name].view(torch.uint8), expected[name].view(torch.uint8)) for name in expected)

    k_proj = "model.layers.0.self_attn.k_proj.weight"
    interleaved = share(arch, MegatronConfig(), LOCAL, ParallelRank(), policy)[
        "decoder.layers.0.self_attention.linear_qkv.weight"
    ]
    there = stored_weights({k_proj: interleaved}, names, FP32.weights)[k_proj + "_scale_inv"]
    first_k_tile = arch.num_heads // arch.num_kv_heads * head_dim // 128
    assert torch.equal(there[first_k_tile], expected[k_proj + "_scale_inv"][0]) == (head_dim == 128)


DENSE, EXPERT = "layers.0.linear", "layers.0.experts.0"


def members(*ranks):
    """As the processes of a grid say it: all hold a dense tensor and an expert."""
    return [(ParallelRank(*rank), {DENSE: None, EXPERT: None}) for rank in ranks]


@pytest.mark.parametrize(
    ("ranks", "dense", "experts"),
    [
        ([(0, 0), (0, 1), (0, 2)], [0], [0, 1, 2]),
        ([(0, 0), (1, 0), (0, 0), (1, 0)], [0, 1], [0]),
        # Of two GPUs that share linears and experts there are not all combinations.
        ([(0, 0), (1, 1)], [0, 1], [0, 1]),
    ],
    ids=["experts", "linears, twice", "both"],
)
def test_everything_is_sent_once_by_the_first_that_holds_it(ranks, dense, experts):
    sent = list(senders(members(*ranks)))
    assert sorted(rank for rank, name in sent if name == DENSE) == dense
    assert sorted(rank for rank, name in sent if name == EXPERT) == experts
    assert max(Counter(sent).values()) == 1
