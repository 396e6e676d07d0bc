"""Which paths compute a family, and which families a decoder from scratch may have."""

import pytest

from fp8core.config.engines import SglangConfig, VllmConfig
from fp8core.config.load import load_config
from fp8core.config.precision import PrecisionContract
from fp8core.config.training import MegatronConfig
from fp8core.errors import UserError
from fp8core.models.families import FAMILIES
from fp8core.models.hub import model_shape
from fp8core.rollout.sglang import entry as sglang
from fp8core.rollout.vllm import entry as vllm
from fp8core.training.megatron.entry import grid_refusals
from fp8core.training.packed import entry as packed

CONTRACT = PrecisionContract()
CHECKS = {
    "packed": lambda arch: packed.model_refusals(arch, CONTRACT, "cpu"),
    "megatron": lambda arch: grid_refusals(arch, MegatronConfig(), CONTRACT, 64),
    "vllm": lambda arch: vllm.model_refusals(arch, CONTRACT, VllmConfig(model="stock")),
    "sglang": lambda arch: sglang.model_refusals(arch, CONTRACT, SglangConfig(model="stock")),
    "aligned": lambda arch: vllm.model_refusals(arch, CONTRACT, VllmConfig(model="aligned")),
}


@pytest.mark.parametrize("family", ["olmo2", "qwen3"])
@pytest.mark.parametrize("path", CHECKS)
def test_a_path_names_the_family_that_it_does_not_compute(architecture, path, family):
    lines = [line for line in CHECKS[path](architecture(family=family)) if "it computes no Olmo2" in line]
    assert len(lines) == (family == "olmo2")
    exact = "rollout.engine=embedded" if path in ("vllm", "sglang", "aligned") else "training.packed=false"
    assert all(line.endswith(exact) and "\n" not in line for line in lines)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["family=olmo"], "architecture.family=olmo: no such family; did you mean olmo2?"),
        (["family=gpt"], f"architecture.family=gpt: no such family; known here: {', '.join(FAMILIES)}"),
        (["num_experts=4"], "num_experts=4 with architecture.family=qwen3; set family to qwen3_moe"),
        (["family=qwen3_moe"], "num_experts=0 with architecture.family=qwen3_moe; set family to llama or "),
        (["family=qwen2", "head_dim=64"], "head_dim=64 with architecture.family=qwen2: .* hidden_size=128"),
    ],
)
def test_a_decoder_from_scratch_has_the_shape_of_its_family(settings, message):
    config = load_config("tiny", [f"architecture.{setting}" for setting in settings])
    with pytest.raises(UserError, match=message):
        model_shape(config)
