import io

import pytest
import torch

from fp8core.config.load import load_config
from fp8core.config.step_graph import StepGraph
from fp8core.data.source import build_source
from fp8core.errors import UserError
from fp8core.numerics.fingerprint import policy_digest
from fp8core.numerics.kv_scales import LayerScales
from fp8core.report.console import Console
from fp8core.rewards.verifier import build_verifier
from fp8core.rollout.engine import PolicyScales
from fp8core.run.build import build_base, build_engine, build_trainer
from fp8core.run.context import RunContext, live_run, register, release
from fp8core.store.run_directory import RunDirectory


@pytest.fixture
def run(tmp_path):
    """A run that is registered, without a policy yet."""
    config = load_config("tiny", {"threads": 2})
    base = build_base(config)
    live = RunContext(
        config=config,
        config_digest="",
        code_version="",
        graph=StepGraph((), {}),
        directory=RunDirectory.create_or_open(tmp_path / "run"),
        tokenizer=base.tokenizer,
        arch=base.arch,
        source=build_source(config.data, config.evaluation),
        verifier=build_verifier(config.reward),
        model_revision=None,
        machine={},
        git={},
        console=Console(io.StringIO(), 1),
        base=base.tensors,
    )
    register(live)
    yield live
    release(live.directory.path)
    live.directory.close()


@pytest.fixture
def threads():
    """Torch's thread count, put back afterwards."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_a_run_is_found_by_its_folder(run, threads):
    assert live_run(run.directory.path) is run
    assert torch.get_num_threads() == 2, "the thread that asks computes with the configured threads"


def test_release_closes_the_engine_and_leaves_the_folder_to_its_owner(run):
    run.trainer = build_trainer(run.config, run.arch, run.base)
    run.engine = engine = build_engine(run.config, run.arch)
    engine.update(run.trainer.export(), PolicyScales(0, (LayerScales(1.0, 1.0, 1.0),) * 2), 0)
    release(run.directory.path)
    assert engine.fingerprint() == policy_digest({})
    with pytest.raises(KeyError):
        live_run(run.directory.path)
    with pytest.raises(UserError, match="is in use"):
        RunDirectory.create_or_open(run.directory.path)
    release(run.directory.path)
