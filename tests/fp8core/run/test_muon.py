"""A run that learns by Muon is a run like others: equal on both sides, redone, replayed and verified."""

import shutil
from collections import Counter

import pytest

from fp8core.errors import UserError
from fp8core.run.verify import verify
from fp8core.store.run_view import RunView

MUON = {"training.optimiser": {"name": "muon", "weight_decay": 0.1}, "training.learning_rate": 0.01}


@pytest.fixture(scope="module")
def by_muon(loop_run):
    return loop_run("by_muon", **MUON)


def test_engine_and_trainer_have_one_policy_that_adamw_has_not(by_muon, whole_run) -> None:
    for index in range(1, 5):
        metrics = by_muon.store.get_json(by_muon.ledger.artifacts(index)["metrics"])
        assert metrics["alignment/token_mult_prob_error"] == 1
    before, after = (run.ledger.artifacts(1) for run in (whole_run, by_muon))
    assert before["rollouts"] == after["rollouts"]
    assert before["next_policy"] != after["next_policy"]


def test_a_run_that_was_cut_goes_on_with_equal_records(by_muon, tmp_path) -> None:
    """From the checkpoint of step 2, by way of an update that is redone."""
    run = by_muon.copy(tmp_path)
    run.cut_after(4, "rollout")
    shutil.rmtree(run.folder / "checkpoints" / "00004")
    run.resume()
    assert run.records == by_muon.records
    for name in ("masters.safetensors", "optimiser.safetensors"):
        first, second = (each.folder / "checkpoints" / "00004" / name for each in (by_muon, run))
        assert first.read_bytes() == second.read_bytes()


def test_a_replay_is_equal_and_the_run_is_verified(by_muon) -> None:
    assert Counter(result.outcome for result in by_muon.replayed(range(1, 5))) == {"equal": 4}
    assert not [finding for finding in verify(RunView.read(by_muon.folder)) if finding.severity == "error"]


def test_an_optimiser_that_is_none_is_one_line(loop_run) -> None:
    with pytest.raises(UserError, match=r"optimiser\.name=json:dumps: it is no OptimiserEntry"):
        loop_run("none", **{"training.optimiser.name": "json:dumps"})
