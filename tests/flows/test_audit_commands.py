"""`fp8-grpo verify` and `fp8-grpo compare` on runs of the flow: what they print, write and exit with."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from flows.cli import main
from fp8core.store.ledger import TaskEntry
from fp8core.store.run_directory import RunDirectory


@pytest.fixture(scope="module")
def run(launch):
    finished = launch("audited", steps=2)
    assert finished.state.is_completed(), finished.state.message
    return finished


@pytest.fixture
def copy(run, tmp_path):
    return Path(shutil.copytree(run.folder, tmp_path / "copy"))


def lines_of(capsys, label):
    """What is printed behind a label."""
    printed = capsys.readouterr().out.splitlines()
    return [line.removeprefix(label).strip() for line in printed if line.startswith(label)]


def test_verify_says_what_the_run_is_and_that_it_is_whole(run, tmp_path, capsys):
    assert main(["verify", str(run.folder), "--json", str(tmp_path / "v.json")]) == 0
    printed = capsys.readouterr().out
    written = json.loads((tmp_path / "v.json").read_text())
    described = json.loads((run.folder / "run.json").read_bytes())
    record = json.loads((run.folder / "manifests/00002.json").read_bytes())["record"]
    assert written["findings"] == []
    counts, about = written["counts"], written["run"]
    assert (counts["steps"], counts["errors"], counts["notes"]) == (3, 0, 0)
    files = [path for folder in ("artifacts", "checkpoints") for path in (run.folder / folder).rglob("*")]
    assert counts["bytes"] == sum(path.stat().st_size for path in files if path.is_file())
    assert (about["id"], about["configuration"], about["steps"]) == (described["id"], "tiny", "0-2")
    assert about["config_digest"] == record["config_digest"]
    assert about["seen"]["code"] == {record["code_version"]: "0-2"}
    assert about["seen"]["level"] == {"exact": "0-2"}
    (segment,) = about["segments"]
    assert segment["code_version"] == described["code_version"]
    shown = [f"id {about['id']}", "steps           0-2 committed, 2 asked for", about["last_record"], "torch "]
    assert [text for text in shown if text not in printed] == []
    assert "verified: 3 steps with the start, " in printed.splitlines()[-1]
    assert printed.endswith("; errors: 0, notes: 0\n")


def test_verify_names_damage_and_exits_with_1(copy, tmp_path, capsys):
    rewards = json.loads((copy / "manifests/00001.json").read_bytes())["observed"]["paths"]["rewards"]
    (copy / rewards).unlink()
    shutil.rmtree(copy / "checkpoints/00002")
    assert main(["verify", str(copy), "--json", str(tmp_path / "v.json")]) == 1
    expected = [
        f"{rewards} (rewards, step 1, task reward): the file is missing",
        "checkpoints/00002 (step 2): the folder is missing, and it is the newest checkpoint",
    ]
    assert lines_of(capsys, "error") == expected
    found = json.loads((tmp_path / "v.json").read_text())
    assert [finding["step"] for finding in found["findings"] if finding["severity"] == "error"] == [1, 2]
    assert found["counts"]["errors"] == 2


def test_verify_looks_at_a_run_that_goes_on(copy, capsys):
    with RunDirectory.create_or_open(copy) as live:
        live.ledger.append(TaskEntry(step=3, task="prompts", key="k", outputs={}, started=0.0, seconds=0.0))
        assert main(["verify", str(copy)]) == 0
    assert lines_of(capsys, "not committed") == ["step 3: prompts"]


@pytest.mark.parametrize("command", [["verify", "nowhere"], ["compare", "nowhere", "nowhere"]])
def test_what_is_no_run_exits_with_2(command, capsys):
    assert main(command) == 2
    assert "nowhere: no run" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_refused_first(run, tmp_path, capsys):
    for command in (["verify", str(run.folder)], ["compare", str(run.folder), str(run.folder)]):
        assert main([*command, "--json", str(tmp_path / "absent" / "v.json")]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.endswith("absent/v.json: cannot be written; name a file in a folder that exists")


@pytest.mark.parametrize("count", [0, 1, 3])
def test_compare_takes_two_runs(run, capsys, count):
    assert main(["compare", *[str(run.folder)] * count]) == 2
    assert capsys.readouterr().err == f"fp8-grpo: compare: it compares two runs, and {count} were given\n"


@pytest.mark.parametrize(("flag", "reason"), [(0, "Permission denied"), (os.ST_RDONLY, "Read-only file system")])
def test_a_folder_that_nobody_may_write_to_is_named_with_the_reason(run, tmp_path, capsys, monkeypatch, flag, reason):
    """Not by modes: they stop nobody who runs the tests as root."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=flag))
    assert main(["verify", str(run.folder), "--json", str(tmp_path / "v.json")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"v.json: cannot be written: {reason}; name a file in another folder")


def test_compare_says_that_a_continued_copy_is_equal(run, copy, capsys):
    description = json.loads((copy / "run.json").read_bytes())
    description["config"]["run"] = "copy"
    (copy / "run.json").write_text(json.dumps(description))
    assert main(["compare", str(run.folder), str(copy)]) == 0
    assert capsys.readouterr().out.splitlines() == ["note           run: audited against copy", "equal: steps 0 to 2"]


def test_compare_names_the_setting_and_the_first_difference(run, launch, tmp_path, capsys):
    other = launch("audited-other", steps=1, overrides={"seed": 1, "loss.clip_low": 0.1})
    capsys.readouterr()
    assert main(["compare", str(run.folder), str(other.folder), "--json", str(tmp_path / "c.json")]) == 1
    said = capsys.readouterr().out
    for found in ("seed: 0 against 1", "loss.clip_low: 0.2 against 0.1", "step 0: seeds.run: 0 against 1"):
        assert found in said
    assert said.endswith("different: from step 0 on\n")
    written = json.loads((tmp_path / "c.json").read_text())
    assert not written["equal"]
    assert written["first_step"] == [0, {"path": "seeds.run", "ours": 0, "theirs": 1}]
