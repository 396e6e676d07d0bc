"""What Megatron keeps on its GPUs between steps, and what a step adds."""

import pytest

from fp8core.config.load import load_config
from fp8core.plan.devices import GPUS, Device, Machine
from fp8core.plan.run_plan import plan_run
from fp8core.plan.shapes import model_shape
from fp8core.plan.training import trainer_grid

H200 = Machine(GPUS["h200"], None)
TRAINER = [
    "training.trainer=megatron",
    "precision.training.kv_cache=bf16",
    "rollout.vllm.sleep=true",
    "rollout.vllm.gpu_memory_utilization=0.45",
]


def planned(config, **grid):
    spread = ", ".join(f"{name}: {str(value).lower()}" for name, value in grid.items())
    found = load_config(config, [*TRAINER, f"training.megatron={{{spread}}}"])
    return plan_run(found, model_shape(found), H200, trainer_grid(found, H200))


def needs(plan, phase):
    (found,) = (p for p in plan.devices[0].phases if p.name == phase)
    return {need.item: need.bytes for need in found.needs}


@pytest.mark.parametrize(
    ("config", "grid"),
    [
        ("qwen3", {"gpus": 8, "recompute": "full", "micro_batch_tokens": 16384}),
        ("llama", {"gpus": 8, "recompute": "full", "micro_batch_tokens": 16384}),
        ("qwen3-moe", {"gpus": 8, "expert_parallel": 8, "recompute": "full", "micro_batch_tokens": 16384}),
    ],
)
def test_the_published_models_fit_eight_gpus(config, grid):
    plan = planned(config, **grid)
    assert plan.refusals == ()
    assert plan.devices[0].count == 8


def test_buffers_stay_while_the_engine_generates():
    plan = planned("qwen3", gpus=8)
    generating, training = needs(plan, "generating"), needs(plan, "training")
    total = plan.parameters.total
    assert generating["weights"] == training["weights"] == 2 * total
    assert generating["gradients"] == training["gradients"] == 4 * total
    assert training["quantised copies"] == 2 * plan.parameters.linear
    assert training["master weights"] == pytest.approx(4 * total / 8, rel=1e-6)


def test_recomputation_and_tensor_parallelism_save_activations():
    grids = ({}, {"recompute": "full"}, {"tensor_parallel": 4, "sequence_parallel": True})
    plain, recomputed, shared = (needs(planned("qwen3", gpus=8, **g), "training")["activations"] for g in grids)
    assert recomputed < plain / 8
    assert shared == pytest.approx(plain / 4)


def test_a_machine_without_a_gpu_trains_on_the_host():
    config = load_config("tiny", ["training.trainer=megatron"])
    assert trainer_grid(config, Machine(None, Device("host", 1 << 34))) is None
