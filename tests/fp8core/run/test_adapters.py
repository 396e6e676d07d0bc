"""A run that learns adapters is a run like others: equal on both sides, resumed, replayed and verified."""

import shutil
from collections import Counter

import pytest
from safetensors.torch import load_file

from fp8core.store.run_directory import read_description


@pytest.fixture
def adapted_copy(adapted, tmp_path):
    return adapted.copy(tmp_path)


def test_engine_and_trainer_have_one_policy(adapted) -> None:
    for index in range(1, 5):
        metrics = adapted.store.get_json(adapted.ledger.artifacts(index)["metrics"])
        assert metrics["alignment/token_mult_prob_error"] == 1
        assert metrics["alignment/tokens_differing"] == 0
    described = adapted.records[4]["executed"]["training"]["lora"]
    assert described.pop("frozen") == {"bf16": 25}
    assert described == read_description(adapted.folder).config["training"]["lora"]


def test_what_is_frozen_stays_and_targets_move(adapted) -> None:
    second, last = (
        load_file(adapted.folder / "checkpoints" / step / "policy" / "model.safetensors") for step in ("00002", "00004")
    )
    for name, tensor in second.items():
        assert bool((last[name] != tensor).any()) is (name.split(".")[-2] in ("q_proj", "o_proj", "down_proj")), name


def test_a_run_that_was_cut_goes_on_with_equal_records(adapted, adapted_copy) -> None:
    """From the checkpoint of step 2, by way of an update that is redone."""
    adapted_copy.cut_after(4, "rollout")
    shutil.rmtree(adapted_copy.folder / "checkpoints" / "00004")
    adapted_copy.resume()
    assert adapted_copy.records == adapted.records
    for name in ("masters.safetensors", "optimiser.safetensors"):
        kept, made = (run.folder / "checkpoints" / "00004" / name for run in (adapted, adapted_copy))
        assert kept.read_bytes() == made.read_bytes()


def test_a_replay_is_equal(adapted) -> None:
    verdicts = adapted.replayed(range(1, 5))
    assert Counter(verdict.outcome for verdict in verdicts) == {"equal": 4}
