"""The metrics of a step are a function of its artifacts, whatever the process that computes them is set to."""

from types import SimpleNamespace

import pytest
import torch

from fp8core.config.load import load_config
from fp8core.config.steps import NoOptions
from fp8core.run import step_metrics
from fp8core.run.step_metrics import torch_threads
from fp8core.store.artifacts import ArtifactStore
from tasks.record import record


@pytest.fixture
def recorded(run_copy):
    """The metrics of a finished step, and a function that computes them again but for those of its cache's scales."""
    artifacts, store = run_copy.ledger.artifacts(1), ArtifactStore(run_copy.folder)
    ports = ("rollouts", "rewards", "logprobs", "train_report", "sync_report", "evaluation", "next_scales")
    inputs = {port: artifacts[port] for port in ports}
    tokenizer = SimpleNamespace(without_token=lambda _: 0)
    run = SimpleNamespace(directory=SimpleNamespace(store=store), config=load_config("tiny"), tokenizer=tokenizer)

    def again():
        return store.get_json(record(run, 1, NoOptions(), **inputs)["metrics"])

    return store.get_json(artifacts["metrics"]), again


def test_a_record_is_computed_by_one_thread_which_the_process_keeps_its_own_beside(recorded, monkeypatch):
    seen = []
    computed = step_metrics.alignment_metrics
    monkeypatch.setattr(
        step_metrics, "alignment_metrics", lambda *a: seen.append(torch.get_num_threads()) or computed(*a)
    )
    then, again = recorded
    with torch_threads(3):
        now = again()
        assert torch.get_num_threads() == 3
    assert now.items() <= then.items()
    assert then.keys() - now.keys() == {"kv/saturated_share", "kv/lag_error"}
    assert seen == [1]
