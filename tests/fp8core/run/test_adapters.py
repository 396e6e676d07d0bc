"""A run that learns adapters is a run like others: equal on both sides, resumed, replayed and verified."""

from safetensors.torch import load_file

from fp8core.store.run_directory import read_description


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
