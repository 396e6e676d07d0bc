"""The published models with one vLLM engine each, as a configuration and as a plan for an H200."""

from collections.abc import Callable
from typing import Any

import pytest

from fp8core.config.load import load_config
from fp8core.config.run import RunConfig
from fp8core.models.hub import model_shape
from fp8core.plan.run_plan import RunPlan, plan_run
from fp8core.resources.memory import GPUS, Machine

_NAMES = {
    "qwen3-8b": "Qwen/Qwen3-8B-Base",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B-Instruct",
}

_ON_GPUS = {"training__device": "cuda", "precision__rounding_points": "kernels"}


def _configured(model: str, precision: str = "fp8_linear_kv", **settings: Any) -> RunConfig:
    linear = "bf16" if precision == "bf16" else "fp8_block"
    cache = "fp8" if precision == "fp8_linear_kv" else "bf16"
    sides = {
        f"precision.{side}.{part}": value
        for side in ("rollout", "training")
        for part, value in (("linear", linear), ("kv_cache", cache))
    }
    # vLLM's experts have no other scales.
    engine = {"rollout.engine": "vllm", "rollout.vllm.gpu_memory_utilization": 0.92, "precision.scale_rule": "pow2"}
    dotted = {key.replace("__", "."): value for key, value in settings.items()}
    return load_config("gsm8k", {"model": _NAMES[model], **engine, **sides, **dotted})


@pytest.fixture(scope="session")
def configured() -> Callable[..., RunConfig]:
    """configured("qwen3-8b", "fp8_linear", rollout__max_batch=64)"""
    return _configured


@pytest.fixture(scope="session")
def planned() -> Callable[..., RunPlan]:
    """planned("qwen3-8b", "bf16", gpu="h100", ranks=8, rollout__vllm__sleep=True)"""

    def plan(
        model: str, precision: str = "fp8_linear_kv", gpu: str = "h200", ranks: int = 0, **settings: Any
    ) -> RunPlan:
        """`ranks`: GPUs that train; 0 trains on the host."""
        if ranks:
            on_gpus = {} if "training__trainer" in settings else _ON_GPUS
            settings = {**on_gpus, "cluster__ranks": ranks, **settings}
        config = _configured(model, precision, **settings)
        return plan_run(config, model_shape(config), Machine(GPUS[gpu], None))

    return plan
