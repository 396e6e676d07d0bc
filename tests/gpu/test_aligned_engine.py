"""The aligned model on a GPU: what a token's log-prob does not depend on, bit for bit.

One engine serves all tests; its cache is far smaller than what the prompts of a batch take, so prefills and decode
steps share batches.
"""

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from aligned_policy import (
    ARCH,
    CONTRACT,
    LONGEST,
    PROBE,
    completions,
    packed_trainer,
    request,
    scored,
    sharp_weights,
    shipped_tensors,
    update,
)
from torch import Tensor

from fp8core.config.capability import this_platform
from fp8core.config.engines import VllmConfig
from fp8core.models.architecture import Architecture, Experts
from fp8core.numerics.attention import HEAD_DIMS
from fp8core.numerics.fingerprint import policy_digest
from fp8core.numerics.fused import static_codes
from fp8core.numerics.truncation import Truncation
from fp8core.processes.variables import set_variables
from fp8core.rollout.engine import Completion
from fp8core.rollout.vllm.entry import contract_refusals, find_build, model_refusals
from fp8core.rollout.vllm.settings import required_environment, suggested_environment
from fp8core.training.packed.trainer import PackedTrainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("gpu"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM"),
]
LARGEST_BATCH = 256
OPTIONS = VllmConfig(
    model="aligned",
    captured_tokens=2048,
    sleep=True,
    max_model_len=LONGEST,
    kv_cache_gib=2.0,
    gpu_memory_utilization=0.4,
)
# Heads of 64, and parts of fused linears that end inside a tile.
PARTIAL = replace(
    ARCH,
    **{"family": "llama", "hidden_size": 576, "intermediate_size": 1500},
    **{"num_heads": 9, "num_kv_heads": 3, "head_dim": 64},
)
SPARSE = replace(
    ARCH,
    family="qwen3_moe",
    experts=Experts(
        count=16, per_token=4, intermediate_size=256, normalise_top_k=True, sparse_step=1, dense_layers=(1,)
    ),
)


def read(done: Completion) -> tuple[list[int], list[float]]:
    return done.tokens, done.logprobs


@pytest.fixture(scope="module", params=[(ARCH, 1), (PARTIAL, 1), (SPARSE, 1), (ARCH, 2), (SPARSE, 2)])
def case(request: pytest.FixtureRequest) -> tuple[Architecture, int]:
    """A decoder, and the GPUs that share its layers in the engine; the trainer has one."""
    arch, gpus = request.param
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    return arch, gpus


@pytest.fixture(scope="module")
def arch(case: tuple[Architecture, int]) -> Architecture:
    return case[0]


@pytest.fixture(scope="module")
def masters(arch: Architecture) -> dict[str, Tensor]:
    return sharp_weights(arch)


@pytest.fixture(scope="module")
def trainer(arch: Architecture, masters: dict[str, Tensor]) -> PackedTrainer:
    """The trainer of the same policy, told the engine's longest request."""
    return packed_trainer(arch, masters)


@pytest.fixture(scope="module")
def tensors(masters: dict[str, Tensor]) -> dict[str, Tensor]:
    return shipped_tensors(masters)


@pytest.fixture(scope="module")
def engine(case: tuple[Architecture, int], tensors: dict[str, Tensor]) -> Iterator[Any]:
    arch, gpus = case
    build, options = find_build(this_platform()), OPTIONS.model_copy(update={"tensor_parallel": gpus})
    assert not [*contract_refusals(CONTRACT, options, build)]
    assert not [*model_refusals(arch, CONTRACT, options)]
    suggested = suggested_environment(1, build)
    set_variables(required_environment(CONTRACT, options, build), suggested)
    from fp8core.rollout.vllm.engine import VllmEngine

    started = VllmEngine(arch, CONTRACT, options, LARGEST_BATCH, build, "attention_worker.AttentionWorker")
    update(started, tensors)
    yield started
    started.close()


@pytest.fixture(scope="module", params=[1.0, 0.7, 0.0])
def temperature(request: pytest.FixtureRequest) -> float:
    return float(request.param)


@pytest.fixture(scope="module")
def alone(engine: Any, temperature: float) -> Completion:
    """The probe with nothing beside it and nothing cached."""
    assert engine.drop_prefixes()
    return completions(engine, [PROBE], temperature)[0]


def test_a_prefix_from_the_cache(engine: Any, alone: Completion, temperature: float) -> None:
    assert read(completions(engine, [PROBE], temperature)[0]) == read(alone)


def test_training_scores_the_same_bits(
    engine: Any, trainer: PackedTrainer, alone: Completion, tensors: dict[str, Tensor], temperature: float
) -> None:
    """Of the probe, and of 40 ragged completions that are packed into several passes: no token differs."""
    assert policy_digest(trainer.export()) == policy_digest(tensors)
    assert scored(trainer, [PROBE], [alone], temperature) == [alone.logprobs]
    groups = [request(i, 1 + 37 * i) for i in range(40)]
    found = completions(engine, groups, temperature)
    assert [done.logprobs for done in found] == scored(trainer, groups, found, temperature)


@pytest.mark.parametrize("truncation", [Truncation(top_p=0.95), Truncation(20, 0.9, 0.01)], ids=str)
def test_training_scores_the_same_bits_in_a_support(
    engine: Any, trainer: PackedTrainer, truncation: Truncation, temperature: float
) -> None:
    """And afterwards in the whole distribution: a session leaves no truncation behind."""
    groups = [request(i, 1 + 37 * i) for i in range(40)]
    for cut in (truncation if temperature else None, None):
        found = completions(engine, groups, temperature, truncation=cut)
        logprobs = [done.logprobs for done in found]
        assert logprobs == scored(trainer, groups, found, temperature, cut)
        is_whole = logprobs == scored(trainer, groups, found, temperature)
        assert is_whole == (cut is None)


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_vllm_writes_the_codes_of_training(dim: int) -> None:
    """Q, and K and V in the cache, as attention in training quantises them, strided and saturating."""
    from vllm import _custom_ops as operations

    generator = torch.Generator().manual_seed(0)
    qkv = (torch.randn(70, 32 * dim, generator=generator) * 8).bfloat16().cuda()
    q, k, v = qkv.split([16 * dim, 8 * dim, 8 * dim], dim=-1)
    scales = [torch.tensor(scale, device="cuda") for scale in (2.0**-5, 2.0**-4, 2.0**-6)]
    found = operations.scaled_fp8_quant(q, scales[0], group_shape=(-1, -1))[0]
    assert torch.equal(found.view(torch.uint8), static_codes(q, 2.0**-5).view(torch.uint8))
    cache = torch.zeros(6, 16, 8, 2 * dim, dtype=torch.uint8, device="cuda")
    keys, values = cache.split(dim, dim=-1)
    slots = torch.randperm(96, generator=generator)[:70].cuda()
    operations.reshape_and_cache_flash(
        k.view(-1, 8, dim), v.view(-1, 8, dim), keys, values, slots, "fp8", scales[1], scales[2]
    )
    for half, x, scale in ((keys, k, 2.0**-4), (values, v, 2.0**-6)):
        written = half.flatten(0, 1)[slots]
        assert torch.equal(written, static_codes(x, scale).view(torch.uint8).view(-1, 8, dim))


def test_other_weights_are_noticed(
    engine: Any, alone: Completion, tensors: dict[str, Tensor], temperature: float
) -> None:
    """An update under captured graphs reaches norms, linears and head; what was there before comes back."""
    down = next(name for name in tensors if name.startswith("model.layers.2.") and name.endswith("down_proj.weight"))
    for name in ("model.layers.3.input_layernorm.weight", down, "lm_head.weight"):
        weight = tensors[name]
        other = weight * 1.5 if weight.dim() == 1 else weight.view(torch.uint8).flip(0).view(weight.dtype)
        changed = {**tensors, name: other}
        update(engine, changed)
        assert read(completions(engine, [PROBE], temperature)[0]) != read(alone), name
    update(engine, tensors)
    assert read(completions(engine, [PROBE], temperature)[0]) == read(alone)
