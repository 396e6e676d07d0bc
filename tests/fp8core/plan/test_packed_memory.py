"""One GPU that generates and trains, with the torch trainer for packed sequences."""

from dataclasses import replace

import pytest

from fp8core.config.load import load_config
from fp8core.plan.devices import GPUS, Machine
from fp8core.plan.needs import DevicePlan
from fp8core.plan.packed import _activations
from fp8core.plan.run_plan import plan_run
from fp8core.plan.shapes import model_shape
from fp8core.plan.training import trainer_grid

H200 = Machine(GPUS["h200"], None)
GIB = 1 << 30


def planned(config: str, *settings: str):
    found = load_config(config, settings)
    return plan_run(found, model_shape(found), H200, trainer_grid(found, H200))


def phase(device: DevicePlan, name: str) -> dict[str, int]:
    needs = next(each.needs for each in device.phases if each.name == name)
    return {need.item: need.bytes for need in needs}


@pytest.mark.parametrize("config", ["qwen3-aligned", "llama-aligned"])
def test_eight_billion_parameters_train_beside_an_engine_that_sleeps(config: str) -> None:
    plan = planned(config)
    assert not plan.refusals
    (device,) = plan.devices
    training = phase(device, "training")
    parameters = plan.parameters.total
    assert training["master weights"] == training["gradients"] == 4 * parameters
    assert training["optimiser states"] == 4 * parameters
    assert training["quantised copies"] == plan.parameters.linear
    assert "engine weights" not in training


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ("training.optimiser_state=fp32", "memory with FP32 moments"),
        ("training.activation_checkpointing=false", "memory with all activations"),
        ("rollout.vllm.sleep=false", "memory with the engine awake"),
    ],
)
def test_it_fits_for_no_other_reason(setting: str, name: str) -> None:
    assert planned("qwen3-aligned", setting).refusals, name


@pytest.mark.parametrize(("cache", "bytes_a_head"), [("fp8", 0), ("bf16", 4)])
def test_every_layer_that_is_recomputed_keeps_its_input_and_what_it_attended_to(cache: str, bytes_a_head: int) -> None:
    """BF16 input, what is added to it, and the attention's result, with its FP32 log-sum-exp for FlashAttention."""
    sides = [f"precision.{side}.kv_cache={cache}" for side in ("rollout", "training")]
    config = load_config("qwen3-aligned", sides)
    arch = model_shape(config)
    more, fewer = (_activations(config, replace(arch, num_layers=layers)) for layers in (36, 35))
    expected = 2 * (2 * 4096 + 32 * 128) + 32 * bytes_a_head
    assert more - fewer == config.training.tokens_per_pass * expected


def test_the_small_loop_keeps_its_engine_awake() -> None:
    plan = planned("h200-small")
    assert not plan.refusals
    (device,) = plan.devices
    training = phase(device, "training")
    assert training["KV cache"] == phase(device, "generating")["KV cache"] > 0
    # Column codes and BF16 tensors of every layer, for each of the tokens of a pass.
    assert 1 * GIB < training["activations"] < 20 * GIB
