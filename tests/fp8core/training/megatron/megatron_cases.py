"""Policies of every family, as changes of the small architecture, and the contract that a CPU trains them in."""

from typing import Any

from fp8core.config.precision import PrecisionContract, SidePrecision, TrainingPrecision
from fp8core.models.architecture import Experts
from fp8core.numerics.rotary import Llama3Scaling

_EXPERTS: dict[str, Any] = {"count": 4, "per_token": 2, "intermediate_size": 48, "dense_layers": ()}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "tied": {"tie_embeddings": True},
    "llama": {
        "family": "llama",
        "rope_scaling": Llama3Scaling(
            factor=4.0, low_freq_factor=1.0, high_freq_factor=3.0, original_max_position_embeddings=16
        ),
    },
    "qwen2": {"family": "qwen2"},
    # A dense layer, then a sparse one.
    "moe": {"family": "qwen3_moe", "experts": Experts(normalise_top_k=True, sparse_step=2, **_EXPERTS)},
    "moe_unnormalised": {"family": "qwen3_moe", "experts": Experts(normalise_top_k=False, sparse_step=1, **_EXPERTS)},
}
_FP32 = SidePrecision(linear="fp32", kv_cache="fp32")
FP32 = PrecisionContract(rollout=_FP32, training=TrainingPrecision(linear="fp32", kv_cache="fp32"))
