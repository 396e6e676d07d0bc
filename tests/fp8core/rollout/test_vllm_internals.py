"""Scales in the buffers and on the host, on modules with the attributes of vLLM's attention."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fp8core.rollout.vllm.internals import VllmPolicy


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


@pytest.fixture
def policy(model):
    runner = SimpleNamespace(get_model=lambda: model)
    return VllmPolicy(SimpleNamespace(model_runner=runner, device=torch.device("cpu")))


SCALES = [[0.5, 0.25, 2.0], [4.0, 0.125, 1.0]]


def test_scales_are_set_in_place_and_on_the_host(model, policy):
    places = [layer._k_scale.data_ptr() for layer in (model[0], model[2])]
    policy._write_scales(SCALES)
    assert policy._read_scales() == SCALES
    assert [layer._k_scale.data_ptr() for layer in (model[0], model[2])] == places
    assert (model[2]._q_scale_float, float(model[2]._k_scale_cpu)) == (4.0, 0.125)


@pytest.mark.parametrize(("name", "column"), [("_q_scale_float", 0), ("_k_scale_cpu", 1), ("_v_scale", 2)])
def test_a_copy_that_differs_reads_as_unwritten(model, policy, name, column):
    policy._write_scales(SCALES)
    held = getattr(model[2], name)
    if isinstance(held, float):
        setattr(model[2], name, 7.0)
    else:
        held.fill_(7.0)
    read = policy._read_scales()
    assert math.isnan(read[1][column])
    assert read[0] == SCALES[0]
