"""Any step of a run is made again from its artifacts alone and compared; the run itself is only read."""

import platform
import tempfile

import pytest

from fp8core.errors import UserError
from fp8core.store.artifacts import Ref
from fp8core.store.ledger import RemovalEntry
from fp8core.store.run_directory import RunDirectory


@pytest.fixture
def replayed(tmp_path, monkeypatch):
    """Replay steps of a run: replayed(run, steps); scratch folders are made below tmp_path / 'scratch'."""
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))

    def verdicts(run, steps):
        try:
            return run.replayed(steps)
        finally:
            assert not list((tmp_path / "scratch").iterdir()), "a scratch folder was left"

    return verdicts


def tree(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def with_other_rollouts(run, index, **hardware):
    """Forge a step consistently: another token in its rollouts, in the ledger and in the manifest; and its machine."""
    forged = None

    def change(entry):
        nonlocal forged
        if entry.get("step") == index and entry.get("task") == "rollout":
            table = run.store.get_table(Ref.model_validate(entry["outputs"]["rollouts"]))
            rows = table.to_pylist()
            rows[5]["tokens"][0] += 1
            forged = run.store.put_table("rollouts", table.from_pylist(rows, schema=table.schema))
            entry["outputs"]["rollouts"] = forged.model_dump()
        if entry["event"] == "step" and entry["step"] == index:
            manifest = run.store.get_json(Ref.model_validate(entry["manifest"]))
            manifest["record"]["outputs"]["rollout"]["rollouts"] = {"digest": forged.digest, "size": forged.size}
            manifest["observed"]["hardware"].update(hardware)
            entry["manifest"] = run.store.put_json("manifest", manifest).model_dump()

    run.rewrite(change)


def test_every_step_comes_out_equal_and_the_run_is_only_read(whole_run, replayed):
    before = tree(whole_run.folder.parent)
    verdicts = replayed(whole_run, range(5))
    assert [(verdict.step, verdict.outcome, verdict.level) for verdict in verdicts] == [
        (step, "equal", "exact") for step in range(5)
    ]
    assert [verdict.artifacts for verdict in verdicts] == [5, 12, 12, 12, 12]
    assert not any((*verdict.causes, *verdict.difference) for verdict in verdicts)
    assert "warm start taken from" not in whole_run.said, "the warm start was made again, not taken from the shelf"
    assert tree(whole_run.folder.parent) == before


def test_a_run_that_was_continued_and_damaged_is_replayed_with_the_length_each_step_had(run_copy, replayed):
    """While it is live; the rollouts of a step before are generated again for its update."""
    run_copy.resume(steps=5)
    run_copy.file(3, "rollouts").write_bytes(b"damaged")
    with RunDirectory.create_or_open(run_copy.folder):
        assert [verdict.outcome for verdict in replayed(run_copy, range(4, 6))] == ["equal", "equal"]
    assert run_copy.file(3, "rollouts").read_bytes() == b"damaged"


def test_a_forged_step_is_found_with_the_first_value_that_differs(run_copy, replayed):
    with_other_rollouts(run_copy, 3)
    verdicts = replayed(run_copy, range(2, 5))
    assert [(verdict.step, verdict.outcome) for verdict in verdicts] == [(2, "equal"), (3, "different")]
    field, there = verdicts[-1].difference
    forged = run_copy.store.get_table(run_copy.ledger.artifacts(3)["rollouts"])["tokens"][5].as_py()
    assert field.startswith("outputs.rollout.rollouts: ")
    assert there == f"row 5, column tokens[0]: {forged[0]} against {forged[0] - 1}"
    assert verdicts[-1].causes == ()


def test_other_code_libraries_and_hardware_are_named(run_copy, replayed):
    record = run_copy.records[0]
    run_copy.change_records(code_version="0" * 64, versions={**record["versions"], "torch": "1.0", "prefect": "2"})
    with_other_rollouts(run_copy, 3, machine="m68k")
    verdicts = replayed(run_copy, range(2, 4))
    code = f"code version differs: made by {'0' * 16}, this is {record['code_version'][:16]}"
    versions = record["versions"]
    libraries = f"library versions differ: torch 1.0 -> {versions['torch']}, prefect 2 -> {versions['prefect']}"
    assert [verdict.outcome for verdict in verdicts] == ["equal", "different"]
    assert verdicts[1].causes == (*verdicts[0].causes, f"hardware differs: machine m68k -> {platform.machine()}")
    assert verdicts[0].causes[0] == code
    assert sorted(verdicts[0].causes[1]) == sorted(libraries)


def test_a_tolerant_replay_compares_metrics_within_bounds(run_copy, replayed):
    run_copy.change_records(level="tolerant")
    with_other_rollouts(run_copy, 3)
    (verdict,) = replayed(run_copy, range(3, 4))
    assert (verdict.outcome, verdict.level) == ("within", "tolerant")
    metrics = run_copy.store.get_json(run_copy.ledger.artifacts(3)["metrics"])
    changed = run_copy.store.put_json("metrics", {**metrics, "alignment/k3_kl": 5.0}).model_dump()
    run_copy.rewrite(lambda entry: entry.get("outputs", {}).get("metrics") and entry["outputs"].update(metrics=changed))
    (beyond,) = replayed(run_copy, range(3, 4))
    assert beyond.outcome == "different"
    assert beyond.difference[0].startswith("alignment/k3_kl: 5.0 against 0.0, beyond replay.relative=")


def test_what_cannot_be_replayed_is_refused(run_copy, replayed):
    with pytest.raises(UserError, match="run whole: step 5 is not committed; steps 0 to 4 are"):
        replayed(run_copy, range(4, 6))
    rollouts = run_copy.file(3, "rollouts")
    with RunDirectory.create_or_open(run_copy.folder) as directory:
        directory.ledger.append(RemovalEntry(steps=[3], when=1.0))
    rollouts.unlink()
    with pytest.raises(UserError, match=f"{rollouts.name}: the file is missing"):
        replayed(run_copy, range(4, 5))
    assert replayed(run_copy, range(3, 4))[0].outcome == "equal"
