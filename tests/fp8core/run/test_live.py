import io
import pickle
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from fp8core.config.load import load_config
from fp8core.config.step_graph import StepGraph
from fp8core.config.training import LoraConfig
from fp8core.data.source import build_source
from fp8core.errors import StoredFileError, UserError
from fp8core.models.tensor_source import FingerprintedTensors
from fp8core.numerics.fingerprint import digest_of, policy_digest
from fp8core.numerics.kv_scales import LayerScales
from fp8core.report.console import Console
from fp8core.rewards.verifier import build_verifier
from fp8core.rollout.engine import PolicyScales
from fp8core.run.build import build_base, build_engine, build_trainer
from fp8core.run.context import RunContext, live_run, register, release
from fp8core.run.policy import initial_trainer
from fp8core.store.ledger import TaskEntry
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


class Elsewhere:
    """The ranks of another node, which read the files of a policy there."""

    def __init__(self, spoilt: Path | None) -> None:
        self.spoilt = spoilt

    def close(self) -> None:
        """There are no processes."""

    def build_trainer(self, config, arch, masters):
        if self.spoilt is not None:
            content = bytearray(self.spoilt.read_bytes())
            content[-1] ^= 1
            self.spoilt.write_bytes(content)
        read = FingerprintedTensors(pickle.loads(pickle.dumps(masters)), torch.device("cpu"))
        trainer = build_trainer(config, arch, read)
        trainer.start_digest = digest_of(read.found)
        return trainer


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("spoilt", [False, True])
def test_ranks_that_have_read_other_weights_than_policy_0_has_are_refused(run, spoilt, adapters):
    if adapters:
        training = run.config.training.model_copy(update={"lora": LoraConfig(rank=2, targets=["q_proj"])})
        run.config = run.config.model_copy(update={"training": training})
    store, made = run.directory.store, {name: tensor + 1 for name, tensor in run.base.items()}
    policy = {"version": 0, "weights_digest": policy_digest(made)}
    outputs = {"policy": store.put_json("policy", policy), "weights": store.put_tensors("weights", made)}
    entry = TaskEntry(step=0, task="warm_start", key="", outputs=outputs, started=0.0, seconds=0.0)
    run.directory.ledger.append(entry)
    run.cluster = Elsewhere(store.path(outputs["weights"]) if spoilt else None)
    with pytest.raises(StoredFileError, match=r"^policy 0 has weights") if spoilt else nullcontext():
        assert initial_trainer(run).start_digest == policy["weights_digest"]
