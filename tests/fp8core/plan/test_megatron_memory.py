"""What Megatron keeps on its GPUs between steps, and what a step adds."""

import pytest

from fp8core.config.load import load_config
from fp8core.errors import UserError
from fp8core.plan.devices import GPUS, Device, Machine
from fp8core.plan.run_plan import plan_run
from fp8core.plan.shapes import model_shape
from fp8core.plan.training import Parallel, trainer_grid

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


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_stages_share_weights_and_no_activations(recompute):
    """The first of four stages has a quarter of the layers, and four packs in flight."""
    one, four = (
        needs(planned("qwen3", gpus=8, pipeline_parallel=stages, recompute=recompute), "training") for stages in (1, 4)
    )
    assert four["weights"] < 0.4 * one["weights"]
    # Two GPUs that hold a stage share its masters: half of FP32 is as much as BF16.
    assert four["master weights"] == pytest.approx(four["weights"], rel=1e-6)
    assert four["activations"] == one["activations"]


def test_stages_and_tensor_parallelism_of_the_command_are_planned():
    """`--gpus 8 --tensor 4 --pipeline 2` plans what the configuration would with that grid."""
    config = load_config("qwen3", [*TRAINER, "training.megatron={gpus: 8}"])
    asked = plan_run(config, model_shape(config), H200, Parallel(gpus=8, tensor=4, pipeline=2))
    configured = planned("qwen3", gpus=8, tensor_parallel=4, pipeline_parallel=2)
    assert needs(asked, "training") == needs(configured, "training")


def test_stages_that_do_not_come_out_even_are_refused():
    with pytest.raises(UserError, match="pipeline 8 does not divide the model's 36 layers"):
        planned("qwen3", gpus=8, pipeline_parallel=8)


def test_a_machine_without_a_gpu_trains_on_the_host():
    config = load_config("tiny", ["training.trainer=megatron"])
    assert trainer_grid(config, Machine(None, Device("host", 1 << 34))) is None
