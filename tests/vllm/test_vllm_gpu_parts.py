"""Parts that only a GPU runs, as far as vLLM for CPUs shows that its release takes them."""

from dataclasses import fields

import pytest
import torch
from conftest import ON_GPU, SHAPE

from fp8core.config.engines import VllmConfig
from fp8core.config.precision import PrecisionContract
from fp8core.models.architecture import Architecture
from fp8core.rollout.requirements import EngineBuild
from fp8core.rollout.vllm.settings import FUSIONS, engine_arguments, required_environment, suggested_environment

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(ON_GPU, reason="the other tests run them")]
GPU = EngineBuild("vllm", "0.26.0")


@pytest.mark.parametrize(
    ("points", "model", "captured", "drafts"),
    [("kernels", "aligned", 2048, 0), ("kernels", "aligned", 0, 8), ("fused", "stock", 0, 0)],
)
def test_vllm_takes_the_settings_of_a_gpu(vllm_build, points, model, captured, drafts):
    from vllm import EngineArgs
    from vllm.envs import environment_variables

    contract = PrecisionContract(rounding_points=points)
    options = VllmConfig(model=model, graphs=True, captured_tokens=captured)
    rest = {"folder": "unused", "max_batch": 8, "worker": "unused", "routes": True, "draft_tokens": drafts}
    taken = EngineArgs(**engine_arguments(Architecture(**SHAPE), contract, options, GPU, **rest))
    assert (taken.create_diffusion_config() is None) == (drafts == 0)
    assert taken.attention_config.flash_attn_version == 3
    assert not any(getattr(taken.compilation_config.pass_config, name) for name in FUSIONS)
    names = required_environment(contract, options, GPU) | suggested_environment(1, GPU)
    assert {name for name in names if name.startswith("VLLM_")} <= {*environment_variables}


def test_a_decode_step_is_for_our_kernel_alone(vllm_build):
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata

    from fp8core.rollout.vllm.decode import DecodeImpl

    step = FlashAttentionMetadata(**dict.fromkeys((field.name for field in fields(FlashAttentionMetadata)), None))
    step.max_query_len, step.seq_lens = 1, torch.tensor([7])
    calls, output = [], torch.zeros(1, 4)
    # vLLM's own attention would lack all that its constructor sets.
    attention = DecodeImpl.__new__(DecodeImpl)
    attention._kernel = lambda *given: calls.append(given)
    assert attention.forward("layer", output, output, output, output, step, output) is output
    ((layer, _, _, queries, written),) = calls
    assert (layer, queries.lengths, written) == ("layer", step.seq_lens, output)
