"""`fp8-grpo verify` and `fp8-grpo compare` on runs of the flow: what they print, write and exit with."""

import json

import pytest

from flows.cli import main


@pytest.fixture(scope="module")
def run(launch):
    finished = launch("audited", steps=2)
    assert finished.state.is_completed(), finished.state.message
    return finished


def test_verify_says_what_the_run_is_and_that_it_is_whole(run, tmp_path, capsys):
    assert main(["verify", str(run.folder), "--json", str(tmp_path / "v.json")]) == 0
    printed = capsys.readouterr().out
    written = json.loads((tmp_path / "v.json").read_text())
    described = json.loads((run.folder / "run.json").read_bytes())
    record = json.loads((run.folder / "manifests/00002.json").read_bytes())["record"]
    assert written["findings"] == []
    counts, about = written["counts"], dict(written["run"])
    assert (counts["steps"], counts["errors"], counts["notes"]) == (3, 0, 0)
    files = [path for folder in ("artifacts", "checkpoints") for path in (run.folder / folder).rglob("*")]
    assert counts["bytes"] == sum(path.stat().st_size for path in files if path.is_file())
    assert about["configuration"] == f"tiny ({record['config_digest'][:12]})"
    assert (about["code"], about["level"]) == (record["code_version"][:12], "exact")
    shown = [f"id {described['id']}", "steps           0-2 committed, 2 asked for", about["last record"], "torch "]
    assert [text for text in shown if text not in printed] == []
    assert "verified: 3 steps with the start, " in printed.splitlines()[-1]
    assert printed.endswith("; errors: 0, notes: 0\n")


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
