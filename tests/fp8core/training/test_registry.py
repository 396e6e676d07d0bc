"""Each trainer has one entry; one of a user's own needs no change elsewhere."""

import sys
from dataclasses import replace

import pytest

from fp8core.config.capability import Environment, this_node
from fp8core.config.load import load_config
from fp8core.models.hub import model_shape
from fp8core.plan.run_plan import plan_run
from fp8core.resources.memory import GPUS, Machine
from fp8core.run.build import build_base, build_trainer, engine_environment
from fp8core.training import registry
from fp8core.training.registry import packages_of, trainer_of, trainers


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ([], "exact"),
        (["training.packed=true"], "packed"),
        (["training.device=cuda"], "packed"),
        (["training.trainer=megatron"], "megatron"),
        (["training.trainer=megatron", "training.device=cuda"], "megatron"),
    ],
)
def test_a_configuration_chooses_one_entry(settings, name):
    training = load_config("tiny", settings).training
    assert trainer_of(training).name == name
    assert sum(entry.is_chosen(training) for entry in trainers()) == 1


def test_a_trainer_from_outside_is_checked_planned_and_built(monkeypatch):
    config = load_config("tiny", ["training.learning_rate=0.125"])
    built = []
    exact = trainer_of(config.training)
    toy = replace(
        exact,
        name="toy",
        is_chosen=lambda training: training.learning_rate == 0.125,
        environment=lambda _: Environment({"TOY": "1"}),
        build=lambda *arguments: built.append(arguments) or exact.build(*arguments),
        check_model=lambda config, arch: built.append(arch) or (),
    )
    monkeypatch.setattr(sys.modules[__name__], "TOY", toy, raising=False)
    monkeypatch.setattr(registry, "TRAINERS", {**registry.TRAINERS, "toy": f"{__name__}:TOY"})
    assert trainer_of(config.training) is toy
    assert engine_environment(config, this_node(packages_of(config))).required["TOY"] == "1"
    base = build_base(config)
    assert built == [base.arch]
    assert build_trainer(config, base.arch, base.tensors).version == 0
    machine = Machine(GPUS["h200"], None)
    assert plan_run(config, model_shape(config), machine).refusals == ()
