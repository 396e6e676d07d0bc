import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fp8core.models.architecture import parameter_shapes
from fp8core.models.formats import rollout_formats
from fp8core.models.weights import stored_weights


@pytest.fixture(scope="module")
def benchmark():
    """benchmarks/vllm_moe_hopper.py; nothing in it needs vLLM before an engine is started."""
    path = Path(__file__).parents[2] / "benchmarks" / "vllm_moe_hopper.py"
    spec = importlib.util.spec_from_file_location("vllm_moe_hopper", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("precision", ["bf16", "fp8_linear_kv"])
def test_random_tensors_are_those_a_trainer_ships(benchmark, precision):
    whole = benchmark.qwen3_30b_a3b(layers=3)
    experts = replace(whole.experts, count=4, intermediate_size=128)
    arch = replace(whole, hidden_size=256, vocab_size=64, experts=experts)
    contract = benchmark.cases.contract(precision)
    masters = {name: torch.zeros(shape) for name, shape in parameter_shapes(arch).items()}
    shipped = stored_weights(masters, rollout_formats(contract, 3).stored_names(), "pow2")
    drawn = benchmark.random_policy(arch, contract, own_layers=2, device="cpu").tensors
    assert {name: (t.dtype, t.shape) for name, t in drawn.items()} == {
        n: (t.dtype, t.shape) for n, t in shipped.items()
    }
    assert all(tensor.is_contiguous() for tensor in drawn.values())
    name = "model.layers.{}.mlp.experts.3.up_proj.weight"
    first, second, third = (drawn[name.format(layer)] for layer in range(3))
    assert third.data_ptr() == first.data_ptr(), "shared"
    assert not first.view(torch.uint8).equal(second.view(torch.uint8))


def test_the_shape_is_qwen3_30b_a3bs(benchmark):
    shapes = parameter_shapes(benchmark.qwen3_30b_a3b())
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == 30_532_122_624
