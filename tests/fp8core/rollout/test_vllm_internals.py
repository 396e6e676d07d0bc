"""Scales in the buffers and on the host, on modules with the attributes of vLLM's attention."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from fp8core.rollout.vllm import internals


class _Attention(nn.Module):
    attn_backend, impl, kv_cache_dtype = object(), object(), "fp8"

    def __init__(self) -> None:
        super().__init__()
        for name in "qkv":
            self.register_buffer(f"_{name}_scale", torch.tensor(1.0))
            setattr(self, f"_{name}_scale_float", 1.0)
        self._k_scale_cpu, self._v_scale_cpu = torch.tensor(1.0), torch.tensor(1.0)


@pytest.fixture
def model():
    return nn.ModuleList([_Attention(), nn.Linear(2, 2), _Attention()])


SCALES = [[0.5, 0.25, 2.0], [4.0, 0.125, 1.0]]


def test_scales_are_set_in_place_and_on_the_host(model):
    places = [layer._k_scale.data_ptr() for layer in (model[0], model[2])]
    internals.write_scales(model, SCALES)
    assert internals.read_scales(model) == SCALES
    assert [layer._k_scale.data_ptr() for layer in (model[0], model[2])] == places
    assert (model[2]._q_scale_float, float(model[2]._k_scale_cpu)) == (4.0, 0.125)


@pytest.mark.parametrize(("name", "column"), [("_q_scale_float", 0), ("_k_scale_cpu", 1), ("_v_scale", 2)])
def test_a_copy_that_differs_reads_as_unwritten(model, name, column):
    internals.write_scales(model, SCALES)
    held = getattr(model[2], name)
    if isinstance(held, float):
        setattr(model[2], name, 7.0)
    else:
        held.fill_(7.0)
    read = internals.read_scales(model)
    assert math.isnan(read[1][column])
    assert read[0] == SCALES[0]


def test_what_a_version_moved_is_named(model):
    assert internals.probe(model) == []
    del model[2]._v_scale
    assert internals.probe(model) == ["2._v_scale"]
    assert internals.probe(nn.Linear(2, 2)) == ["attention layers with attn_backend"]


class _Experts(nn.Module):
    def __init__(self, copied: str = "") -> None:
        super().__init__()
        self.w13_weight = nn.Parameter(torch.zeros(2, 256, 128).to(torch.float8_e4m3fn), requires_grad=False)
        for part, rows in (("w13", 2), ("w2", 1)):
            scales = nn.Parameter(torch.ones(2, rows, 1), requires_grad=False)
            self.register_parameter(f"{part}_weight_scale_inv", scales)
        held = {"w1_scale": self.w13_weight_scale_inv, "w2_scale": self.w2_weight_scale_inv}
        kernel = type("TritonExperts", (), held | ({copied: held[copied].clone()} if copied else {}))()
        self.quant_method = SimpleNamespace(moe_kernel=SimpleNamespace(fused_experts=kernel))


def test_experts_are_described_by_the_kernel_that_multiplies(model):
    model.append(_Experts())
    assert internals.probe(model) == []
    described = internals.describe_linears(model)
    assert described == {"3": {"kernel": "TritonExperts", "dtype": "float8_e4m3fn"}}


@pytest.mark.parametrize(("copied", "parameter"), [("w1_scale", "w13"), ("w2_scale", "w2")])
def test_a_kernel_with_scales_of_its_own_is_named(model, copied, parameter):
    model.append(_Experts(copied))
    assert internals.probe(model) == [f"3: a kernel that reads {parameter}_weight_scale_inv"]


def test_recorded_experts_are_ascending_and_of_sparse_layers_alone():
    chosen = np.array([[[3, 1], [0, 0], [0, 2]], [[2, 0], [0, 0], [1, 3]]])
    found = internals.recorded_experts(chosen, (0, 2), 2)
    assert (found.dtype, found.tolist()) == (torch.int16, [[[1, 3], [0, 2]], [[0, 2], [1, 3]]])


@pytest.mark.parametrize(
    ("chosen", "positions", "said"),
    [
        (None, 2, "the experts of nothing of 2 positions"),
        (np.zeros((2, 1, 2)), 3, "of 2 of 3"),
        (np.zeros((2, 1, 2)), 2, "one expert twice"),
    ],
)
def test_experts_that_were_not_recorded_are_none(chosen, positions, said):
    with pytest.raises(RuntimeError, match=said):
        internals.recorded_experts(chosen, (0,), positions)
