"""Reference and teacher: their memory on the GPUs that train, on the host, and beside what their trainers hold."""

import pytest
import torch
from held_tensors import tensors_in

from fp8core.config.load import load_config
from fp8core.models.checkpoint import initial_weights, save_checkpoint
from fp8core.models.hub import model_shape
from fp8core.numerics.kv_scales import LayerScales
from fp8core.plan.frozen_trainers import frozen_trainers
from fp8core.plan.run_plan import plan_run
from fp8core.resources.memory import GPUS, Device, Machine
from fp8core.rl.batch import TokenBatch
from fp8core.run.build import build_base, build_teacher, build_trainer
from fp8core.training.registry import trainer_grid

PARAMETERS, LINEARS = 8_190_735_360, 6_945_767_424
READY = LINEARS + 4 * (LINEARS // 128**2) + 2 * (PARAMETERS - LINEARS) + LINEARS


def steps(**named):
    """Scoring steps by name, with the settings that read their scores."""
    inputs = {"reference": ["rollouts", "scales"], "teacher": ["rollouts"]}
    inserted = [
        {"after": "rollout", "step": {"name": name, "uses": f"tasks.{name}:{name}", "needs": inputs[name]}}
        for name in named
    ]
    return {
        "pipeline": {"insert": inserted, "rewire": {"train": {name: name for name in named}}},
        **{key: value for settings in named.values() for key, value in settings.items()},
    }


REFERENCE = {"loss.reference_kl": 0.05}


def teacher(model):
    return {"loss.distillation.teacher": str(model), "loss.distillation.weight": 1.0}


def planned(name, settings, gpu="h100"):
    config = load_config(name, settings)
    machine = Machine(None if gpu is None else GPUS[gpu], Device("host", 1 << 40))
    return plan_run(config, model_shape(config), machine, trainer_grid(config, machine))


def sizes(phase):
    return {need.item: need.bytes for need in phase.needs}


BOTH = {"reference": REFERENCE, "teacher": teacher("Qwen/Qwen3-8B-Base")}


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("placement", ["colocated", "separate"])
def test_every_gpu_that_trains_holds_masters_of_the_trainer_that_scores_in_every_phase(name, placement):
    cluster = {"cluster": {"engines": 8, "ranks": 8, "placement": placement}}
    plain, scored = (planned("qwen3-aligned", cluster | more) for more in ({}, steps(**{name: BOTH[name]})))
    for before, after in zip(plain.devices, scored.devices, strict=True):
        for one, other in zip(before.phases, after.phases, strict=True):
            added = {name: -(-PARAMETERS // 8) * 4} if "master weights" in sizes(one) else {}
            assert sizes(other) == sizes(one) | added


def test_a_pass_of_those_that_score_is_a_phase_where_it_takes_more_than_an_update():
    """Two score at the same time, whose weights each GPU has whole; no gradient is there."""
    settings = {"cluster": {"engines": 8, "ranks": 8}, "training.reduce_gradients": "per_pass"}
    phases = {phase.name: phase for phase in planned("qwen3-aligned", settings | steps(**BOTH)).devices[0].phases}
    found = sizes(phases["scoring"])
    assert (found["weights of the reference"], found["weights of the teacher"]) == (READY, 2 * PARAMETERS)
    assert phases["scoring"].total > phases["training"].total
    assert found.keys().isdisjoint({"gradients", "activations"})


def test_a_training_that_no_longer_fits_beside_those_that_score_is_refused():
    cluster = {"cluster": {"engines": 8, "ranks": 8}}
    assert planned("qwen3-aligned", cluster | steps(reference=REFERENCE)).refusals == ()
    (refusal,) = planned("qwen3-aligned", cluster | steps(**BOTH)).refusals
    assert refusal.startswith("training on each of 8 NVIDIA H100")


def test_a_packed_trainer_that_scores_holds_its_masters_between_passes():
    config = load_config("careful", {"training.packed": True, "precision.rounding_points": "kernels"})
    arch = model_shape(config)
    trainer = build_trainer(config, arch, initial_weights(arch, config.seed))
    scales, batch = [LayerScales(1.0, 1.0, 1.0)] * arch.num_layers, TokenBatch.of([[3, 4, 5]], [[6, 7]])
    first = trainer.logprobs(batch, 1.0, scales)
    trainer.rest()
    collectors = [parameter.grad for parameter in trainer._decoder.parameters()]
    held = [*tensors_in([trainer.masters, trainer._decoder._values, collectors, vars(trainer._optimiser)])]
    held += [each for layer in trainer._decoder.packed_layers() for each in tensors_in(vars(layer))]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in held}
    masters = 4 * sum(tensor.numel() for tensor in trainer.masters.values())
    assert sum(storages.values()) == pytest.approx(masters, rel=0.001)
    assert torch.equal(trainer.logprobs(batch, 1.0, scales).logprobs, first.logprobs)


def held_by(trainer):
    """Bytes of an exact trainer after a pass."""
    trainer.logprobs(TokenBatch.of([[3, 4, 5]], [[6, 7]]), 1.0, [LayerScales(1.0, 1.0, 1.0)] * trainer.arch.num_layers)
    found = (trainer.masters, trainer._optimiser.state, trainer._inference_weights(), trainer._prepared)
    kept = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors_in(found)}
    return sum(kept.values())


def test_a_host_holds_what_a_reference_keeps_after_a_pass():
    config = load_config("careful")
    arch = model_shape(config)
    (found,) = frozen_trainers(config, arch, None).on_host
    held = held_by(build_trainer(config, arch, initial_weights(arch, config.seed)))
    assert (found.item, found.bytes) == ("reference", pytest.approx(held, rel=0.05))


def test_a_host_holds_what_a_teacher_of_another_shape_keeps_after_a_pass(tmp_path):
    base = build_base(load_config("tiny", {"architecture.num_layers": 3}))
    save_checkpoint(tmp_path / "teacher", base.arch, base.tensors, base.tokenizer)
    config = load_config("distil", {"loss.distillation.teacher": str(tmp_path / "teacher")})
    (found,) = frozen_trainers(config, model_shape(config), None).on_host
    held = held_by(build_teacher(config, base.tokenizer))
    assert (found.item, found.bytes) == ("teacher", pytest.approx(held, rel=0.05))


def test_a_teacher_that_cannot_be_read_is_planned_as_large_as_the_policy(tmp_path):
    config = load_config("distil", {"loss.distillation.teacher": str(tmp_path / "later")})
    (found,) = frozen_trainers(config, model_shape(config), None).on_host
    assert "as large as the policy" in found.note
    assert found.bytes > 4 * sum(tensor.numel() for tensor in initial_weights(model_shape(config), 0).values())


def test_a_teacher_on_the_hosts_of_gpus_is_planned_there():
    """Megatron trains on GPUs; its teacher is a torch trainer, on `training.device`."""
    plan = planned("qwen3", {"cluster.ranks": 8, **steps(teacher=teacher("Qwen/Qwen3-8B-Base"))}, gpu="h200")
    host = plan.devices[-1]
    assert host.name == "host"
    assert "teacher" in sizes(host.phases[0])
