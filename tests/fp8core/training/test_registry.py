"""Each trainer has one entry; one of a user's own needs no change elsewhere."""

import subprocess
import sys
from dataclasses import replace

import pytest

from fp8core.config.capability import Environment, this_node
from fp8core.config.load import load_config
from fp8core.models.hub import model_shape
from fp8core.plan.run_plan import plan_run
from fp8core.resources.memory import GPUS, Machine
from fp8core.run.build import build_base, build_trainer
from fp8core.run.machine import engine_environment
from fp8core.training import registry
from fp8core.training.registry import TRAINERS, find_trainer, packages_of, trainer_grid, trainer_of, trainers


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
    assert sum(entry.chosen(training) for entry in trainers()) == 1


def test_a_trainer_from_outside_is_checked_planned_and_built(monkeypatch):
    config = load_config("tiny", ["training.learning_rate=0.125"])
    built = []
    exact = trainer_of(config.training)
    toy = replace(
        exact,
        name="toy",
        chosen=lambda training: training.learning_rate == 0.125,
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
    assert plan_run(config, model_shape(config), machine, trainer_grid(config, machine)).refusals == ()


def test_entries_import_no_library_of_a_trainer():
    program = (
        "import sys, fp8core.training.registry as r; r.trainers(); "
        "print([m for m in sys.modules if m.startswith(('megatron', 'transformer_engine')) "
        "or m in ('fp8core.training.megatron.trainer', 'fp8core.training.packed.trainer')])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout.strip() == "[]"


def test_the_table_has_the_names_of_its_entries():
    assert [find_trainer(name).name for name in TRAINERS] == [*TRAINERS]


@pytest.mark.parametrize("name", TRAINERS)
def test_a_trainer_alone_has_the_whole_policy_in_one_process(name):
    spread = {"tensor_parallel": 2, "sequence_parallel": True, "pipeline_parallel": 2}
    changes = {"training.trainer": "megatron" if name == "megatron" else "torch", "training.packed": name == "packed"}
    training = load_config("tiny", {**changes, "training.learning_rate": 0.5}).training
    training = training.model_copy(update={"megatron": training.megatron.model_copy(update=spread)})
    alone = find_trainer(name).alone(training)
    assert alone.learning_rate == 0.5
    if name == "megatron":
        assert alone.megatron == load_config("tiny").training.megatron
    else:
        assert alone == training
