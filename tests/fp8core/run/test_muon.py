"""A run that learns by Muon is a run like others: equal on both sides, redone, replayed and verified."""

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


def test_a_replay_is_equal_and_the_run_is_verified(by_muon) -> None:
    assert Counter(result.outcome for result in by_muon.replayed(range(1, 5))) == {"equal": 4}
    assert not [finding for finding in verify(RunView.read(by_muon.folder)) if finding.severity == "error"]


def test_an_optimiser_that_is_none_is_one_line(loop_run) -> None:
    with pytest.raises(UserError, match=r"optimiser\.name=json:dumps: it is no OptimiserEntry"):
        loop_run("none", **{"training.optimiser.name": "json:dumps"})
