import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fp8core.numerics.rotary import SCALINGS, inverse_frequencies

ORIGINAL = {"original_max_position_embeddings": 8192}
LLAMA = ORIGINAL | {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
QWEN = {"factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("kind", "dim", "theta", "keys"),
    [
        ("linear", 64, 10_000.0, {"factor": 3.0}),
        ("llama3", 128, 500_000.0, LLAMA | {"factor": 8.0}),
        ("llama3", 64, 500_000.0, LLAMA | {"factor": 32.0}),
        ("llama3", 32, 10_000.0, LLAMA | {"factor": 4.0, "low_freq_factor": 2.0, "high_freq_factor": 3.0}),
        ("yarn", 128, 1e6, QWEN),
        ("yarn", 64, 1e6, QWEN | {"attention_factor": 1.25, "beta_fast": 16.0, "beta_slow": 2.0}),
        ("yarn", 64, 10_000.0, ORIGINAL | {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.8}),
        ("yarn", 64, 150_000.0, ORIGINAL | {"factor": 32.0, "truncate": False}),
        # Both ends of the ramp in one dimension, and a factor that stretches nothing.
        ("yarn", 64, 1e6, QWEN | {"factor": 1.0, "beta_fast": 4.0, "beta_slow": 4.0, "truncate": False}),
    ],
)
def test_scalings_are_those_of_transformers(kind, dim, theta, keys) -> None:
    rope = {"rope_type": kind, "rope_theta": theta, **keys}
    expected, attention_factor = ROPE_INIT_FUNCTIONS[kind](LlamaConfig(head_dim=dim, rope_parameters=rope))
    scaling = SCALINGS[kind](**keys)
    found = scaling.frequencies(dim, theta)
    assert torch.equal(found, expected)
    assert scaling.attention_scale == attention_factor
    plain = inverse_frequencies(dim, theta)
    assert keys["factor"] == 1 or torch.isclose(found[-1], plain[-1] / keys["factor"]), "the longest are stretched"
    assert kind == "linear" or torch.isclose(found[0], plain[0]), "and the shortest are not"
