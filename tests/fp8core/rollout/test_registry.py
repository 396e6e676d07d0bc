"""Every registered engine has an entry; one from outside the package trains, is checked and is planned by its own."""

import io
import subprocess
import sys
from dataclasses import replace

import pytest

from fp8core.config.capability import this_node
from fp8core.config.load import load_config
from fp8core.errors import UserError
from fp8core.models.hub import model_shape
from fp8core.plan.run_plan import plan_run
from fp8core.report.console import Console
from fp8core.resources.memory import Machine
from fp8core.rollout.registry import find_entry, longest_row
from fp8core.run.loop import train
from fp8core.run.open import open_directory, open_run
from fp8core.run.refusals import check_engine, graph_of
from fp8core.store.layout import LEDGER
from fp8core.store.ledger import LedgerView
from fp8core.training.registry import packages_of

TOY = '''
from fp8core.models.weights import rollout_formats
from fp8core.rollout.embedded import EmbeddedEngine
from fp8core.rollout.registry import EngineEntry


class ToyEngine(EmbeddedEngine):
    """The embedded engine under another name, which counts its completions."""

    completions = 0

    def generate(self, groups, sampling):
        for finished in super().generate(groups, sampling):
            ToyEngine.completions += len(finished)
            yield finished

    def describe(self):
        return {**super().describe(), "engine": "toy"}


def build(config, arch):
    return ToyEngine(arch, rollout_formats(config.precision, arch.num_layers), config.rollout.max_batch)


def check(config, node):
    if config.rollout.group_size > 16:
        yield f"rollout.group_size={config.rollout.group_size}: the toy engine draws at most 16"
    if config.rollout.temperature != 1:
        yield f"rollout.temperature={config.rollout.temperature}: the toy engine has 1 alone"


ENGINE = EngineEntry(name="toy", build=build, check=check)
NO_ENTRY = ToyEngine
'''


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Settings that choose the engine of a module that lies beside the user's configuration."""
    (tmp_path / "toy_engine.py").write_text(TOY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "toy_engine", raising=False)
    return {"rollout.engine": "toy_engine:ENGINE"}


def test_an_engine_from_outside_trains(toy, small, tmp_path):
    config = load_config("tiny", {**small, **toy, "steps": 1, "runs": str(tmp_path / "runs")})
    with (
        open_directory(config, "toy") as directory,
        open_run(config, graph_of(config), directory, Console(io.StringIO(), config.steps)) as run,
    ):
        train(run)
        manifest = directory.store.get_json(LedgerView.read(directory.path / LEDGER).step(1).manifest)
    assert manifest["record"]["executed"]["rollout"]["engine"] == "toy"
    drawn = config.rollout.prompts_per_step * config.rollout.group_size
    assert sys.modules["toy_engine"].ToyEngine.completions >= drawn


def test_its_own_checks_and_memory_are_taken(toy):
    config = load_config("tiny", {**toy, "rollout.group_size": 32, "rollout.temperature": 0.5})
    with pytest.raises(UserError, match=r"^rollout.group_size=32: .*; also rollout.temperature=0.5: "):
        check_engine(config, this_node(packages_of(config)))
    plan = plan_run(config, model_shape(config), Machine(None, None))
    (host,) = plan.devices
    assert "engine weights" in {need.item for need in host.phases[0].needs}
    assert plan.cache is None


@pytest.mark.parametrize(("engine", "limit"), [("vllm", "max_model_len"), ("sglang", "context_length")])
def test_a_limit_of_an_engine_above_the_positions_of_the_model_is_refused(engine, limit):
    for longest, expected in ((255, 255), (256, 256), (257, 256), (None, 256)):
        config = load_config("tiny", {"rollout.engine": engine, f"rollout.{engine}.{limit}": longest})
        arch = replace(model_shape(config), max_positions=256)
        assert longest_row(config, arch) == expected
        refused = [line for line in find_entry(engine).check_model(config, arch) if limit in line]
        line = f"rollout.{engine}.{limit}=257: the model has 256 positions; lower it, or set it to null"
        assert refused == ([line] if longest == 257 else [])


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("vlm", "rollout.engine: vlm is none of embedded, vllm"),
        ("no_such_module:ENGINE", "rollout.engine=no_such_module:ENGINE: no_such_module cannot be imported"),
        ("toy_engine:MISSING", "rollout.engine=toy_engine:MISSING: module toy_engine has no MISSING"),
        ("toy_engine:NO_ENTRY", "rollout.engine=toy_engine:NO_ENTRY: it is no EngineEntry"),
    ],
)
def test_what_is_no_engine_is_refused_by_name(toy, name, complaint):
    with pytest.raises(UserError, match=f"^{complaint}"):
        check_engine(load_config("tiny", {"rollout.engine": name}), this_node(find_entry(name).packages))


@pytest.mark.parametrize("mode", ["synchronous", "one_step_off"])
def test_an_environment_is_refused_where_a_second_turn_would_be_answered_without_the_first(toy, mode):
    environment = {"environment": {"name": "calculator", "max_turns": 2}, "pipeline.mode": mode}
    with pytest.raises(
        UserError, match=r"^environment\.name=calculator: rollout\.engine=toy_engine:ENGINE does not go on"
    ):
        graph_of(load_config("tiny", toy | environment))
    graph_of(load_config("tiny", environment))


def test_reading_a_configuration_imports_neither_torch_nor_an_engine():
    program = (
        "import sys; from fp8core.config.run import RolloutConfig; RolloutConfig(engine='vllm'); "
        "entries = {'fp8core.rollout.embedded', 'fp8core.rollout.vllm.entry', 'fp8core.rollout.sglang.entry'}; "
        "print(sorted({'torch', 'vllm', 'sglang', *entries} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
