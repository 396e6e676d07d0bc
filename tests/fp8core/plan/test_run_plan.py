"""Whether a training fits: on one GPU for generation, in turn on the GPUs that train, on the host; and what is said."""

from dataclasses import replace

import pytest

from fp8core.config.load import load_config, shipped_names
from fp8core.errors import UserError
from fp8core.models.hub import HUB_ARCHITECTURES, model_shape
from fp8core.plan.run_plan import check_fit, fit_summary, plan_run
from fp8core.report.text import plan_text
from fp8core.resources.memory import GPUS, Device, Machine

STATE = {"master weights", "optimiser states"}
SLEEPS = {"rollout__vllm__sleep": True, "rollout__vllm__gpu_memory_utilization": 0.6}


def items(phase):
    return {need.item for need in phase.needs}


def phases(plan):
    return {(device.name, phase.name): phase for device in plan.devices for phase in device.phases}


def test_the_exact_trainer_computes_on_the_host_beside_an_engine_on_a_gpu(planned):
    found = phases(planned("qwen3-8b"))
    assert items(found["NVIDIA H200", "generating"]) == {"engine weights", "engine workspace", "KV cache"}
    assert {*STATE, "gradients"} < items(found["host", "training"])
    assert len(found) == 2


def test_gpus_that_do_both_hold_the_state_all_the_time_and_the_engine_sleeps_while_they_train(planned):
    plan = planned("qwen3-8b", ranks=8, cluster__engines=8, **SLEEPS)
    assert plan.refusals == ()
    (device,) = plan.devices
    assert device.count == 8
    generating, training, syncing = device.phases
    assert items(generating) == {"engine weights", "engine workspace", "KV cache", "trainer at rest", *STATE}
    assert STATE | {"engine asleep", "gradients", "activations"} < items(training)
    assert "engine weights" not in items(training)
    assert items(syncing) == {"weights to send", *items(generating)}
    (awake,) = planned("qwen3-8b", ranks=8, cluster__engines=8).devices
    assert {"KV cache", "gradients"} < items(awake.phases[1])


@pytest.mark.parametrize(
    ("engines", "trainers", "alone"), [(2, 8, ["training", "syncing"]), (8, 2, ["generating"]), (2, 1, ["generating"])]
)
def test_gpus_that_only_train_or_only_generate_are_planned_beside_those_that_do_both(planned, engines, trainers, alone):
    both, rest = planned("qwen3-8b", ranks=trainers, cluster__engines=engines, **SLEEPS).devices
    assert (both.count, rest.count) == (min(engines, trainers), abs(engines - trainers))
    assert [phase.name for phase in both.phases] == ["generating", "training", "syncing"]
    assert [phase.name for phase in rest.phases] == alone


def test_frozen_scorers_take_memory_too():
    inserted = [
        {"after": "rollout", "step": {"name": name, "uses": f"tasks.{name}:{name}", "needs": needs}}
        for name, needs in {"reference": ["rollouts", "scales"], "teacher": ["rollouts"]}.items()
    ]
    wires = {"train": {"reference": "reference", "teacher": "teacher"}}
    settings = {
        "pipeline": {"insert": inserted, "rewire": wires},
        "cluster": {"engines": 8, "ranks": 8},
        "loss.reference_kl": 0.05,
        "loss.distillation.teacher": "Qwen/Qwen3-8B-Base",
        "loss.distillation.weight": 1.0,
    }
    configs = [load_config("qwen3-aligned", {**settings, **more}) for more in ({}, {"loss.reference.every": 50})]
    frozen, following = (plan_run(each, model_shape(each), Machine(GPUS["h200"], None)) for each in configs)
    (device,) = frozen.devices
    assert all({"reference", "teacher"} < items(phase) for phase in device.phases)
    bytes_of_reference = following.checkpoint.bytes - frozen.checkpoint.bytes
    assert bytes_of_reference == (4 + 2) * frozen.parameters.total, "FP32 and the policy in BF16"


@pytest.mark.parametrize(
    ("model", "gpu", "settings", "line"),
    [
        ("qwen3-30b-a3b", "h100", {"gpu_memory_utilization": 0.35}, "generating on NVIDIA H100 80 GB"),
        ("qwen3-30b-a3b", "h100", {"gpu_memory_utilization": 0.35}, "raise rollout.vllm.gpu_memory_utilization"),
        ("qwen3-8b", "h100", {"kv_cache_gib": 80.0}, "lower rollout.vllm.kv_cache_gib"),
        ("llama-3.1-8b", "h100", {"kv_cache_gib": 7.0}, "131,072; raise rollout.vllm.kv_cache_gib"),
        ("qwen3-8b", "h200", {"gpu_memory_utilization": 0.1}, "32,768; raise rollout.vllm.gpu_"),
        ("llama-3.1-8b", "h100", {"kv_cache_gib": 7.0, "max_model_len": 4096}, None),
    ],
)
def test_an_engine_that_does_not_fit_is_refused_in_one_line(planned, model, gpu, settings, line):
    plan = planned(model, gpu=gpu, **{f"rollout__vllm__{name}": value for name, value in settings.items()})
    if line is None:
        check_fit(plan)
        return
    with pytest.raises(UserError) as refused:
        check_fit(plan)
    message = str(refused.value)
    assert message.startswith("memory: ")
    assert line in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("precision", "tokens"), [("bf16", 802_000), ("fp8_linear", 849_000), ("fp8_linear_kv", 1_699_000)]
)
def test_an_h200_has_room_for_these_tokens_of_qwen3_8b(planned, precision, tokens):
    """143,771 MiB x 0.92, less the weights and 4 GB."""
    plan = planned("qwen3-8b", precision, rollout__max_new_tokens=3072, rollout__prompts_per_step=64)
    assert plan.cache.tokens == pytest.approx(tokens, abs=500)
    assert (plan.cache.sequence, plan.cache.sequences) == (512 + 3072, plan.cache.tokens // 3584)
    (phase,) = plan.devices[0].phases
    assert phase.total == phase.limit == int(143_771 * 2**20 * 0.92)
    assert fit_summary(plan) == "fits"


@pytest.mark.parametrize(("left", "line"), [(0.031, "fits"), (0.029, "fits closely: 2.9% is left while ")])
def test_little_room_is_said_with_what_to_change(planned, left, line):
    plan = planned("llama-3.1-8b", gpu="h200", ranks=8)
    fullest = max((phase for device in plan.devices for phase in device.phases), key=lambda phase: phase.total)

    def limited(device):
        limit = round(fullest.total / (1 - left))
        return replace(device, phases=tuple(replace(phase, limit=limit) for phase in device.phases))

    assert fit_summary(replace(plan, devices=tuple(map(limited, plan.devices)))).startswith(line)


def test_a_host_is_refused_by_what_is_needed_for_certain(configured):
    config = configured("qwen3-8b", rollout__engine="embedded")
    arch, needed = model_shape(config), 8_190_735_360 * (4 + 4 + 8)
    small = plan_run(config, arch, Machine(None, Device("host", needed)))
    assert "generating and training on host needs " in small.refusals[0]
    assert plan_run(config, arch, Machine(None, Device("host", 4 * needed))).refusals == ()
    assert plan_run(config, arch, Machine(None, None)).refusals == ()


@pytest.mark.parametrize("name", shipped_names())
def test_every_shipped_configuration_has_a_plan(name):
    config = load_config(name, {"model": "Qwen/Qwen3-8B-Base"} if name.startswith("gsm8k") else {})
    if config.model is not None and config.model not in HUB_ARCHITECTURES:
        pytest.skip("its model is in a folder that a user makes")
    machine = Machine(GPUS["h200"], None)
    plan = plan_run(config, model_shape(config), machine)
    assert "parameters" in plan_text(plan).splitlines()[0]
