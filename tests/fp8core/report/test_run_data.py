import pytest

from fp8core.config.run import KeepConfig
from fp8core.metrics.reward import REWARD
from fp8core.report.run_data import OUTSIDE_TASKS, read_run, time_spent
from fp8core.store.gc import plan_removal, remove
from fp8core.store.metrics import HELDOUT, series


def test_the_history_is_what_the_steps_recorded(whole_run) -> None:
    run = read_run(whole_run.folder, "whole")
    stored = {step: whole_run.store.get_json(whole_run.ledger.artifacts(step)["metrics"]) for step in range(1, 5)}
    assert list(run.history[1:]) == [{"step": step, **stored[step]} for step in range(1, 5)]
    start = whole_run.ledger.artifacts(0)
    assert run.history[0][HELDOUT.name] == whole_run.store.get_json(start["evaluation"])["accuracy"]
    assert run.history[0]["rollout/precision_gap_kl"] == whole_run.store.get_json(start["precision_gap"])["kl"]
    assert (run.status, run.requested, run.missing) == ("finished, 4 steps", 4, [])


def test_the_time_of_a_run_is_that_of_its_start_of_its_steps_and_a_rest(whole_run) -> None:
    view = read_run(whole_run.folder, "whole").view
    spent = time_spent(view)
    start = whole_run.ledger.tasks(0)
    names = {"warm_start": "warm_start", "calibrate": "first_scales", "evaluate": "first_evaluation"}
    assert {names.get(name, name): task.seconds for name, task in start.items()}.items() <= spent.items()
    trained = sum(whole_run.ledger.tasks(step)["train"].seconds for step in range(1, 5))
    assert spent["train"] == pytest.approx(trained)
    # Tasks that run side by side count twice, so the parts are the whole at least.
    whole = sum(view.process_seconds)
    assert 0 < spent[OUTSIDE_TASKS] < whole <= sum(spent.values()) + 1e-3


def test_a_run_that_goes_on_is_read_up_to_its_last_step(run_copy) -> None:
    run_copy.cut_after(3, "rollout")
    for later in ("manifests/0000[34]*", "checkpoints/0000[34]"):
        for path in run_copy.folder.glob(later):
            path.rename(run_copy.folder / path.name)
    with (run_copy.folder / "ledger.jsonl").open("a") as ledger:
        ledger.write('{"event":"task","st')
    run = read_run(run_copy.folder, "live")
    assert run.status == "2 of 4 steps"
    assert [row["step"] for row in run.history] == [0, 1, 2]
    assert run.missing == []


def test_what_gc_removed_is_named_and_the_rest_is_there(run_copy) -> None:
    removal = plan_removal(run_copy.folder, KeepConfig(last=1))
    remove(run_copy.folder, removal)
    run = read_run(run_copy.folder, "thin")
    assert len(series(run.history, REWARD.name)[0]) == 4
    assert {example.step for example in run.examples} == {4}
    (removed,) = run.missing
    assert removed.startswith("gc removed files of steps 1-3 on ")


def test_damage_is_named_and_the_rest_is_there(run_copy) -> None:
    run_copy.file(2, "metrics").unlink()
    run_copy.file(4, "rollouts").write_bytes(b"no parquet")
    manifest = run_copy.ledger.step(3).manifest
    (run_copy.folder / manifest.uri).unlink()
    run = read_run(run_copy.folder, "damaged")
    assert [row["step"] for row in run.history if REWARD.name in row] == [1, 3, 4]
    assert {example.step for example in run.examples} == {1}
    text = "\n".join(run.missing)
    for place in ("metrics of step 2: the file is missing", "completions of step 4:", manifest.uri):
        assert place in text
    assert "libraries" in dict(run.provenance.lines(run.view))
