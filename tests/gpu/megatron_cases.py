"""Small policies of each family, and the exact trainer in FP32, beside which the Megatron trainer is tested."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fp8core.config.load import load_config
from fp8core.config.run import RunConfig
from fp8core.models.architecture import Architecture, Experts
from fp8core.models.checkpoint import initial_weights
from fp8core.models.weights import reference_formats, rollout_formats
from fp8core.rl.batch import RolloutBatch, TokenBatch, length_mask
from fp8core.rl.objective import Objective
from fp8core.training.exact import ExactTrainer

TEMPERATURE = 1.0
# Of linears and of the KV cache.
_FORMATS = {"bf16": ("bf16", "bf16"), "fp8": ("fp8_block", "bf16")}
_EXPERTS = Experts(count=8, per_token=2, intermediate_size=256, normalise_top_k=True, sparse_step=1, dense_layers=())
_SMALL: dict[str, dict[str, Any]] = {
    "qwen3": {"family": "qwen3"},
    "llama": {"family": "llama"},
    "qwen3-moe": {"family": "qwen3_moe", "experts": _EXPERTS},
    "qwen2": {"family": "qwen2", "hidden_size": 512, "head_dim": 64},
}
PARITY = tuple(_SMALL)


def small(family: str) -> Architecture:
    """A policy that the exact trainer still computes on a CPU, with true tiles where the family has no sizes."""
    sizes: dict[str, Any] = {
        "vocab_size": 2048,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_layers": 2,
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_positions": 4096,
        "rope_scaling": None,
        "tie_embeddings": False,
    }
    return Architecture(**{**sizes, **_SMALL[family]})


def configuration(precision: str, *changes: str) -> RunConfig:
    """A run with the Megatron trainer; `precision` is a key of `_FORMATS`."""
    linear, cache = _FORMATS[precision]
    side = f"{{linear: {linear}, kv_cache: {cache}}}"
    trainer = ["training.trainer=megatron", "training.warmup_steps=0", "training.max_grad_norm=1e9"]
    sides = [f"precision.rollout={side}", f"precision.training={side}", "precision.scale_rule=pow2"]
    return load_config("tiny", [*sides, *trainer, *changes])


def small_policy(arch: Architecture) -> dict[str, Tensor]:
    """BF16 values, which every trainer holds exactly; norms that are not all 1."""
    generator = torch.Generator().manual_seed(1)
    weights = initial_weights(arch, seed=0)
    norms = {n: w + 0.2 * torch.randn(w.shape, generator=generator) for n, w in weights.items() if w.dim() == 1}
    return {name: tensor.bfloat16().float() for name, tensor in (weights | norms).items()}


def random_batch(arch: Architecture, sequences: int, prompt: int, completion: int) -> RolloutBatch:
    """Random tokens, log-probs of about a uniform policy and random advantages."""
    generator = torch.Generator().manual_seed(2)
    drawn = torch.randint(2, arch.vocab_size, (sequences, prompt + completion), generator=generator).tolist()
    completions = [row[prompt:] for row in drawn]
    mask = length_mask(completions)
    old = torch.zeros(mask.shape) - torch.tensor(float(arch.vocab_size)).log()
    return RolloutBatch(
        sequences=TokenBatch.of([row[:prompt] for row in drawn], completions),
        policy_mask=mask,
        rollout_logprobs=old,
        old_logprobs=old,
        reference_logprobs=None,
        advantages=torch.randn(sequences, generator=generator),
        row_mask=torch.ones(sequences, dtype=torch.bool),
    )


def fp32_logprobs(config: RunConfig, arch: Architecture, weights: Mapping[str, Tensor], batch: RolloutBatch) -> Tensor:
    """Log-probs [rows, tokens] of the torch trainer on the CPU in FP32: what all formats approximate."""
    stored, objective = rollout_formats(config.precision, arch.num_layers), Objective(config.loss, config.correction)
    trainer = ExactTrainer(arch, weights, reference_formats(arch.num_layers), stored, config.training, objective)
    return trainer.logprobs(batch.sequences, TEMPERATURE, ()).logprobs
