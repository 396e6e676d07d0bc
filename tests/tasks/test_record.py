"""The metrics of a step are a function of its artifacts, whatever the process that computes them is set to."""

from types import SimpleNamespace

import pyarrow as pa
import pytest
import torch

from fp8core.config.load import load_config
from fp8core.config.steps import NoOptions
from fp8core.store.artifacts import ArtifactStore
from tasks import record as module
from tasks.record import mismatch_by_turn, record, torch_threads


@pytest.fixture
def threads():
    with torch_threads(3):
        yield


@pytest.fixture
def recorded(run_copy):
    """The metrics of a finished step, and a function that computes them again but for those of its cache's scales."""
    artifacts, store = run_copy.ledger.artifacts(1), ArtifactStore(run_copy.folder)
    ports = ("rollouts", "rewards", "logprobs", "train_report", "sync_report", "evaluation", "next_scales")
    inputs = {port: artifacts[port] for port in ports}
    run = SimpleNamespace(directory=SimpleNamespace(store=store), config=load_config("tiny"))

    def again():
        return store.get_json(record(run, 1, NoOptions(), **inputs)["metrics"])

    return store.get_json(artifacts["metrics"]), again


def test_a_record_is_computed_by_one_thread_which_the_process_keeps_its_own_beside(threads, recorded, monkeypatch):
    seen = []
    computed = module.alignment_metrics
    monkeypatch.setattr(module, "alignment_metrics", lambda *a: seen.append(torch.get_num_threads()) or computed(*a))
    then, again = recorded
    assert (now := again()).items() <= then.items()
    assert then.keys() - now.keys() == {"kv/saturated_share", "kv/lag_error"}
    assert seen == [1]
    assert torch.get_num_threads() == 3


def test_a_failure_gives_the_threads_back(threads):
    with pytest.raises(ValueError, match="no"), torch_threads(1):
        raise ValueError("no")
    assert torch.get_num_threads() == 3


def test_a_difference_is_told_of_the_turns_that_wrote_its_tokens():
    """Completions that are not compared, and tokens of the environment, have no part in it."""
    # Tokens of turns 1 to 4, each with its answer.
    ranges = {0: [(0, 2, 3), (3, 4, 6), (6, 9, 9)], 1: [(0, 1, 2), (2, 3, 4), (4, 5, 6), (6, 7, 7)], 2: [(0, 2, 2)]}
    turns = [{"group": 0, "sample": sample, "turn": 0, "begin": 0, "end": 0} for sample in ranges]
    turns += [
        {"group": 0, "sample": sample, "turn": number, "begin": begin, "end": end}
        for sample, rows in ranges.items()
        for number, (begin, end, _) in enumerate(rows, start=1)
    ]
    sampled = [[-1.0] * rows[-1][2] for rows in ranges.values()]
    trained = [[*row] for row in sampled]
    trained[0][2] = -9.0  # What the environment said.
    trained[0][3] = -1.25  # Turn 2.
    trained[0][7], trained[0][8] = -1.5, -0.25  # Turn 3.
    trained[1][6] = -3.0  # Turn 4.
    trained[2][0] = -9.0  # Not compared.
    tables = [pa.table({"logprobs": pa.array(rows, pa.list_(pa.float32()))}) for rows in (sampled, trained)]
    assert mismatch_by_turn(turns, *tables, {(0, 0): 0, (0, 1): 1}) == {
        "alignment/logprob_abs_diff_max_turn_1": 0.0,
        "alignment/logprob_abs_diff_max_turn_2_3": 0.75,
        "alignment/logprob_abs_diff_max_turn_4_7": 2.0,
        "alignment/tokens_differing_turn_1": 0.0,
        "alignment/tokens_differing_turn_2_3": 3.0,
        "alignment/tokens_differing_turn_4_7": 1.0,
    }
