import math

import pytest
import torch

from fp8core.config.precision import PrecisionContract
from fp8core.config.run import ArchitectureConfig
from fp8core.models.architecture import parameter_shapes
from fp8core.models.initial import architecture_from_config, initial_weights
from fp8core.rl.batch import TokenBatch


def test_the_configured_shape_is_built():
    config = ArchitectureConfig(
        hidden_size=24, intermediate_size=40, num_layers=3, num_heads=6, num_kv_heads=3, head_dim=10, max_positions=50
    )
    arch = architecture_from_config(config, vocab_size=17)
    shapes = parameter_shapes(arch)
    assert shapes["model.embed_tokens.weight"] == shapes["lm_head.weight"] == (17, 24)
    assert shapes["model.layers.2.self_attn.q_proj.weight"] == (60, 24)
    assert (
        shapes["model.layers.2.self_attn.k_proj.weight"] == shapes["model.layers.2.self_attn.v_proj.weight"] == (30, 24)
    )
    assert shapes["model.layers.2.self_attn.o_proj.weight"] == (24, 60)
    assert shapes["model.layers.2.self_attn.q_norm.weight"] == (10,)
    assert shapes["model.layers.2.mlp.down_proj.weight"] == (24, 40)
    assert (arch.family, arch.max_positions, arch.rope_theta) == ("qwen3", 50, 10_000.0)


def test_without_qk_norm_it_is_a_llama_and_a_tied_head_is_no_parameter():
    arch = architecture_from_config(ArchitectureConfig(qk_norm=False, tie_embeddings=True), vocab_size=17)
    assert arch.family == "llama"
    assert not any("q_norm" in name or name == "lm_head.weight" for name in parameter_shapes(arch))


def test_experts_of_the_configured_shape_are_built():
    config = ArchitectureConfig(
        num_layers=4, num_experts=3, expert_intermediate_size=16, decoder_sparse_step=2, mlp_only_layers=[1]
    )
    arch = architecture_from_config(config, vocab_size=17)
    shapes = parameter_shapes(arch)
    assert (arch.family, arch.sparse_layers) == ("qwen3_moe", (3,))
    assert shapes["model.layers.3.mlp.gate.weight"] == (3, 128)
    assert shapes["model.layers.3.mlp.experts.2.up_proj.weight"] == (16, 128)
    weights = initial_weights(architecture_from_config(ArchitectureConfig(num_experts=64), vocab_size=17), 0)
    assert weights["model.layers.0.mlp.gate.weight"].std().item() == pytest.approx(128**-0.5, rel=0.03)
    assert weights["model.layers.0.mlp.experts.5.down_proj.weight"].std().item() == pytest.approx(
        128**-0.5 / 2, rel=0.03
    )


def test_weights_depend_on_the_seed_alone(architecture):
    arch = architecture()
    first, again, other = initial_weights(arch, 0), initial_weights(arch, 0), initial_weights(arch, 1)
    assert {name: tuple(tensor.shape) for name, tensor in first.items()} == parameter_shapes(arch)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first if first[name].dim() == 2)
    state = torch.random.get_rng_state()
    initial_weights(arch, 2)
    assert torch.equal(torch.random.get_rng_state(), state), "the global generator must not be drawn from"


def test_spreads(architecture):
    arch = architecture(hidden_size=256, intermediate_size=512, num_layers=2, vocab_size=500)
    weights = initial_weights(arch, 0)
    expected = {
        "model.embed_tokens.weight": 1.0,
        "lm_head.weight": 256**-0.5,
        "model.layers.0.self_attn.q_proj.weight": 256**-0.5,
        "model.layers.1.mlp.up_proj.weight": 256**-0.5,
        "model.layers.1.mlp.down_proj.weight": 512**-0.5 / 2,
        "model.layers.0.self_attn.o_proj.weight": (4 * 24) ** -0.5 / 2,
    }
    for name, spread in expected.items():
        assert weights[name].std().item() == pytest.approx(spread, rel=0.03), name
    assert all(bool((tensor == 1).all()) for tensor in weights.values() if tensor.dim() == 1)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("hidden", [32, 256])
def test_a_fresh_policy_is_nearly_uniform(architecture, trainer_of, first_scales, ragged_prompts, hidden, tied):
    arch = architecture(hidden_size=hidden, tie_embeddings=tied)
    trainer = trainer_of(PrecisionContract(), arch, masters=initial_weights(arch, 3))
    sequences = TokenBatch.of(ragged_prompts(8, 40), ragged_prompts(8, 40, seed=1))
    scored = trainer.logprobs(sequences, 1.0, first_scales(trainer, PrecisionContract()).layers)
    assert scored.entropy.nanmean() > 0.75 * math.log(40)
