"""What Megatron keeps on its GPUs between steps, and what a step adds."""

import pytest

from fp8core.config.load import load_config
from fp8core.errors import UserError
from fp8core.plan.devices import GPUS, Device, Machine
from fp8core.plan.run_plan import plan_run
from fp8core.plan.shapes import model_shape
from fp8core.plan.training import Parallel, trainer_grid

H200 = Machine(GPUS["h200"], None)


def planned(config, *settings, **grid):
    """A shipped configuration for eight GPUs, with another grid."""
    spread = [f"training.megatron.{name}={str(value).lower()}" for name, value in grid.items()]
    found = load_config(config, [*settings, *spread])
    return plan_run(found, model_shape(found), H200, trainer_grid(found, H200))


def needs(plan, phase):
    (found,) = (p for p in plan.devices[0].phases if p.name == phase)
    return {need.item: need.bytes for need in found.needs}


@pytest.mark.parametrize("config", ["qwen3", "llama", "qwen3-moe"])
def test_the_published_models_fit_eight_gpus_with_a_tenth_to_spare(config):
    plan = planned(config)
    assert plan.refusals == ()
    (device,) = plan.devices
    assert device.count == 8
    assert all(phase.total < 0.9 * phase.limit for phase in device.phases)
    assert plan.cache.sequences >= plan.cache.wanted


def test_four_gpus_hold_the_dense_ones_but_not_the_experts():
    assert planned("qwen3-moe", gpus=4, expert_parallel=4).refusals
    assert planned("qwen3", gpus=4).refusals == ()


def test_buffers_stay_while_the_engine_generates():
    plan = planned("qwen3")
    generating, training = needs(plan, "generating"), needs(plan, "training")
    total = plan.parameters.total
    assert generating["weights"] == training["weights"] == 2 * total
    assert generating["gradients"] == training["gradients"] == 4 * total
    assert training["quantised copies"] == 2 * plan.parameters.linear
    assert training["master weights"] == pytest.approx(4 * total / 8, rel=1e-6)


def test_an_update_wakes_all_of_the_engine_and_shared_weights_come_from_main_memory():
    generating, syncing = (needs(planned("qwen3-moe"), phase) for phase in ("generating", "syncing"))
    assert syncing == generating
    assert syncing["KV cache"] > 0


@pytest.mark.parametrize("gpus", [1, 8])
def test_a_gpu_that_holds_all_weights_lends_what_it_sends_beside_the_engine(gpus):
    plan = planned("qwen3", gpus=gpus)
    syncing = needs(plan, "syncing")
    assert syncing["weights to send"] == plan.sync.total
    assert syncing["KV cache"] == needs(plan, "generating")["KV cache"]


def test_beside_no_engine_that_slept_there_is_what_the_weights_are_made_from():
    plan = planned("qwen3", "rollout.vllm.sleep=false", gpus=1)
    training = next(device for device in plan.devices if len(device.phases) > 1)
    (syncing,) = (phase for phase in training.phases if phase.name == "syncing")
    assert {need.item: need.bytes for need in syncing.needs}["what they are made from"] == 2 * plan.parameters.total


def test_masters_are_shared_out_only_if_asked():
    shared, whole = (needs(planned("qwen3", distributed_optimizer=each), "training") for each in (True, False))
    assert whole["master weights"] == 4 * planned("qwen3").parameters.total
    assert whole["optimiser states"] == pytest.approx(8 * shared["optimiser states"], rel=1e-6)
    experts = needs(planned("qwen3-moe", distributed_optimizer=False), "training")
    assert experts["master weights"] == 2 * experts["weights"]


def test_the_head_adds_its_gradient_up_in_fp32():
    """151,936 rows of 4,096, twice, and four tensors of half a GiB of logits; a tensor-parallel group shares rows."""
    one, four = (needs(planned("qwen3", tensor_parallel=each), "training")["head"] for each in (1, 4))
    assert one == 2 * 4 * 151_936 * 4096 + 4 * 4 * 2**27
    assert four - 4 * 4 * 2**27 == 2 * 4 * 38_016 * 4096


def test_recomputation_and_tensor_parallelism_save_activations():
    shape = {"tensor_parallel": 4, "sequence_parallel": True}
    grids = ({"recompute": "none"}, {"recompute": "full"}, {"recompute": "none", **shape})
    plain, recomputed, shared = (needs(planned("qwen3", **grid), "training")["activations"] for grid in grids)
    assert recomputed < plain / 8
    assert shared == pytest.approx(plain / 4)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_stages_share_weights_and_no_activations(recompute):
    """The first of four stages has a quarter of the layers, and four packs in flight."""
    one, four = (
        needs(planned("qwen3", pipeline_parallel=stages, recompute=recompute), "training") for stages in (1, 4)
    )
    assert four["weights"] < 0.4 * one["weights"]
    # Two GPUs that hold a stage share its masters: half of FP32 is as much as BF16.
    assert four["master weights"] == pytest.approx(four["weights"], rel=1e-6)
    assert four["activations"] == one["activations"]


def test_stages_and_tensor_parallelism_of_the_command_are_planned():
    """`--gpus 8 --tensor 4 --pipeline 2` plans what the configuration would with that grid."""
    config = load_config("qwen3")
    asked = plan_run(config, model_shape(config), H200, Parallel(gpus=8, tensor=4, pipeline=2))
    configured = planned("qwen3", tensor_parallel=4, pipeline_parallel=2)
    assert needs(asked, "training") == needs(configured, "training")


def test_stages_that_do_not_come_out_even_are_refused():
    with pytest.raises(UserError, match="pipeline 8 does not divide the model's 36 layers"):
        planned("qwen3", pipeline_parallel=8)


def test_a_machine_without_a_gpu_trains_on_the_host():
    config = load_config("tiny", ["training.trainer=megatron"])
    assert trainer_grid(config, Machine(None, Device("host", 1 << 34))) is None


def test_a_repeatable_backward_holds_all_scores_and_says_how_to_do_without():
    plan = planned("qwen3", "training.deterministic=true")
    scores = needs(plan, "training")["attention scores"]
    # 11 sequences of 1,536 tokens fill a pack of 16,384; 32 heads, FP32.
    assert scores == 11 * 32 * 16384 * 16384 * 4
    assert plan.refusals
    assert all("set training.deterministic=false, " in refusal for refusal in plan.refusals)
    assert "attention scores" not in needs(planned("qwen3"), "training")
    fewer = planned("qwen3", "training.deterministic=true", micro_batch_tokens=2048)
    assert fewer.refusals == ()
