"""What `deployment_hopper` runs: published models and configurations made small, and problems in a file."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from fp8core.config.load import load_config
from fp8core.models.architecture import Architecture
from fp8core.plan.shapes import PUBLISHED

MODELS = ("llama", "qwen3", "qwen3-moe")
"""Configurations; each names its published model."""

GRIDS: dict[str, dict[str, Any]] = {
    "one": {"training.megatron.gpus": 1, "rollout.vllm.gpus": 1},
    "dp2": {"training.megatron.gpus": 2, "rollout.vllm.gpus": 2},
    "pp2": {"training.megatron.gpus": 2, "rollout.vllm.gpus": 2, "training.megatron.pipeline_parallel": 2},
    "tp2": {
        **{"training.megatron.gpus": 2, "rollout.vllm.gpus": 2, "training.megatron.tensor_parallel": 2},
        "training.megatron.sequence_parallel": True,
    },
    "ep2": {"training.megatron.gpus": 2, "rollout.vllm.gpus": 2, "training.megatron.expert_parallel": 2},
    "dp2-tp2": {
        **{"training.megatron.gpus": 4, "rollout.vllm.gpus": 4, "training.megatron.tensor_parallel": 2},
        "training.megatron.sequence_parallel": True,
    },
}
"""Settings that spread a small run over GPUs: data, pipeline, tensor with sequence, and expert parallel."""

# Seen from the working directory of a deployment, which is the checkout.
_COIN = "benchmarks/coin.py:score"
# True 128 x 128 tiles in every linear, heads of 128, groups of four queries. DeepGEMM's experts are put together for
# hidden sizes that are powers of two.
_SHAPES: dict[str, dict[str, int]] = {
    "cuda": {"hidden_size": 1024, "intermediate_size": 2816, "num_layers": 4, "num_heads": 8, "num_kv_heads": 2},
    "cpu": {"hidden_size": 128, "intermediate_size": 256, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2},
}
_HEAD = {"cuda": 128, "cpu": 32}
_EXPERTS = {"cuda": (16, 4, 512), "cpu": (4, 2, 128)}
_VOCABULARY = 512

_SMALL: dict[str, dict[str, Any]] = {
    "cuda": {
        **{"rollout.prompts_per_step": 8, "rollout.group_size": 8, "rollout.max_new_tokens": 128},
        # Some 16,000 tokens a step: several packs, of different lengths, for processes to share and stages to pass on.
        "training.megatron.micro_batch_tokens": 4096,
    },
    "cpu": {
        **{"rollout.prompts_per_step": 2, "rollout.group_size": 4, "rollout.max_new_tokens": 8, "threads": 1},
        # What Megatron computes on a CPU.
        "precision": {
            "rollout": {"linear": "fp32", "kv_cache": "fp32"},
            "training": {"linear": "fp32", "kv_cache": "fp32"},
            "rounding_points": "stepwise",
        },
        **{"rollout.engine": "embedded", "training.megatron.recompute": "none"},
    },
}

CASES = (*MODELS, *(f"qwen3/{grid}" for grid in ("dp2", "pp2", "tp2", "dp2-tp2")), "qwen3-moe/ep2")
"""What can be run: a configuration on one GPU, or on the GPUs of a grid."""


def parts_of(case: str) -> tuple[str, str]:
    """The configuration and the grid of a case."""
    name, _, grid = case.partition("/")
    return name, grid or "one"


def small_model(name: str, device: str) -> Architecture:
    """The family and details of the configuration's model at a small shape; its weights are drawn by `random_model`."""
    published = PUBLISHED[str(load_config(name).model)]
    if (experts := published.experts) is not None:
        count, per_token, width = _EXPERTS[device]
        experts = replace(experts, count=count, per_token=per_token, intermediate_size=width)
    return replace(published, **_SHAPES[device], head_dim=_HEAD[device], vocab_size=_VOCABULARY, experts=experts)


def small_settings(device: str, grid: str) -> dict[str, Any]:
    """Overrides of a configuration beside model and problems, by dotted key."""
    # Experts stay whole unless the grid shares them.
    spread = {"training.megatron.expert_parallel": 1, **GRIDS[grid]}
    return {**spread, **_SMALL[device], "evaluation.prompts": 8, "reward.verifier": _COIN}


def small_problems(path: Path) -> Path:
    """Write sums in GSM8K's format, some of which are held out."""
    rows = [
        {"question": f"Tom has {a} apples and buys {b} more. How many are there now?", "answer": f"#### {a + b}"}
        for a in range(3, 19)
        for b in range(2, 18)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
