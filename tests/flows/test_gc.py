"""`fp8-grpo gc` on a real run, which goes on afterwards."""

import json
import os
import re
import shutil

import pytest

from flows.cli import main
from flows.tracking.store import default_tracking_uri
from fp8core.store.artifacts import ArtifactStore
from fp8core.store.run_directory import RunDirectory

KEEP = {"checkpoint.every": 1, "checkpoint.keep": 1, "artifacts.keep": {"last": 1, "every": 2}}
NARROW = ["--set", "artifacts.keep={last: 1, every: null}"]


@pytest.fixture(scope="module")
def run(launch, runs):
    """Five steps, with a checkpoint after each."""
    # The store is named, so that copies log to it too.
    finished = launch("collected", steps=5, overrides={**KEEP, "tracking.uri": default_tracking_uri(runs)})
    assert finished.state.is_completed(), finished.state.message
    return finished


@pytest.fixture
def copy(run, tmp_path):
    return shutil.copytree(run.folder, tmp_path / "collected")


def files(folder):
    return {path for path in folder.rglob("*") if path.is_file()}


def total(paths):
    return sum(path.stat().st_size for path in paths)


def test_a_running_run_keeps_the_checkpoints_that_artifacts_keep_names(run):
    assert sorted(path.name for path in (run.folder / "checkpoints").iterdir()) == ["00002", "00004", "00005"]


def test_without_yes_it_lists_and_removes_nothing(copy, capsys):
    before = files(copy)
    assert main(["gc", str(copy)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        'artifacts.keep: {"last":1,"every":2}',
        "steps kept:     0, 2, 4-5",
        "steps dropped:  1, 3",
    ]
    table = {line.split()[0]: line.split()[1:] for line in lines[5:-2]}
    assert table["rollouts"][0] == "2"
    assert not {"metrics", "policy", "manifest", "checkpoint"} & set(table)
    removed = next(line.split() for line in lines if line.startswith("in all"))
    assert lines[-1] == f"nothing was removed yet: --yes removes {removed[2]} files, {removed[3]} bytes"
    assert files(copy) == before


def test_a_run_goes_on_from_what_was_kept(run, copy, launch, capsys):
    """Its last checkpoint is gone, so that it also redoes a step."""
    shutil.rmtree(copy / "checkpoints" / "00005")
    size = total(files(copy / "artifacts"))
    assert main(["gc", str(copy), "--yes", *NARROW]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[1:3] == ["steps kept:     0, 4-5", "steps dropped:  1-3"]
    assert re.fullmatch(r"removed \d+ files, [\d,]+ bytes", out[-1])
    assert sorted(path.name for path in (copy / "checkpoints").iterdir()) == ["00004"]
    assert total(files(copy / "artifacts")) < size
    elsewhere = {"runs": str(copy.parent), "tracking.uri": default_tracking_uri(run.runs)}
    continued = launch("collected", steps=6, overrides={**KEEP, **elsewhere})
    assert continued.state.is_completed(), continued.state.message
    store, ledger = ArtifactStore(copy), continued.ledger
    assert sorted(ledger.steps()) == list(range(7))
    assert all(store.get_json(entry.manifest) for entry in ledger.steps().values())
    assert main(["gc", str(copy), *NARROW]) == 0
    assert "steps kept:     0, 6" in capsys.readouterr().out


def test_verify_counts_what_was_removed_apart(copy, capsys):
    assert main(["gc", str(copy), "--yes", *NARROW]) == 0
    capsys.readouterr()
    assert main(["verify", str(copy), "--tracking-uri", "none"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.search(rf" {len(files(copy / 'artifacts'))} artifacts, [1-9]\d* removed, ", last), last


def test_a_live_run_is_refused_by_its_process(copy, capsys):
    with RunDirectory.create_or_open(copy):
        assert main(["gc", str(copy), "--yes"]) == 2
    assert capsys.readouterr().err.startswith(f"fp8-grpo: {copy} is in use by process {os.getpid()} on ")


def test_a_run_that_keeps_every_step_loses_orphans_only(copy, capsys):
    orphan = ArtifactStore(copy).put_json("metrics", {"of": "a killed task"})
    before = files(copy)
    assert main(["gc", str(copy), "--yes", "--set", "artifacts.keep=null"]) == 0
    assert "steps dropped:  none" in capsys.readouterr().out
    assert before - files(copy) == {copy / orphan.uri}
    assert main(["gc", str(copy), "--yes", "--set", "artifacts.keep=null"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["in", "all", "0", "0"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere: no run (no run.json in "),
        (["RUN", "--set", "steps=4"], "--set steps=4: gc takes settings of artifacts.keep alone"),
        (["RUN", "--set", "artifacts.keep.steps=2"], "artifacts.keep.steps: unknown key"),
        (["RUN", "--set", "artifacts.keep.best={metric: reward/mena}"], "no step has a metric reward/mena"),
    ],
)
def test_mistakes_are_one_line(copy, capsys, arguments, message):
    assert main(["gc", *(str(copy) if argument == "RUN" else argument for argument in arguments)]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert len(shown.splitlines()) == 1


def test_a_run_says_early_that_no_step_has_the_metric_of_the_best(launch, capfd):
    launch("misnamed", steps=1, overrides={"artifacts.keep": {"best": {"metric": "reward/mena"}}})
    assert "artifacts.keep.best.metric=reward/mena: step 1 has no such metric" in capfd.readouterr().out


def test_steps_that_mlflow_has_not_got_are_kept(copy, capsys):
    tracking = copy / "tracking.json"
    tracking.write_text(json.dumps({**json.loads(tracking.read_text()), "published": 2}))
    assert main(["gc", str(copy), *NARROW]) == 0
    assert capsys.readouterr().out.splitlines()[1:3] == ["steps kept:     0, 3-5", "steps dropped:  1-2"]
