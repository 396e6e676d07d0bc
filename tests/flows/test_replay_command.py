"""`fp8-grpo replay`: what it prints and writes, and its exit codes."""

import json
import re

import pytest

from flows.cli import main


@pytest.fixture
def replay(capsys):
    """Run the command; returns exit code, stdout as lines, and stderr."""

    def command(*arguments):
        code = main(["replay", *map(str, arguments)])
        printed = capsys.readouterr()
        return code, printed.out.splitlines(), printed.err

    return command


def test_equal_steps_are_a_line_each(whole_run, replay, tmp_path):
    code, lines, errors = replay(whole_run.folder, "--from", 3, "--json", tmp_path / "verdicts.json")
    assert code == 0
    assert [re.sub(r"\d+\.\d s", "T", line) for line in lines] == [
        "step 3: equal (exact; 12 artifacts, T)",
        "step 4: equal (exact; 12 artifacts, T)",
    ]
    assert errors == ""
    written = json.loads((tmp_path / "verdicts.json").read_text())
    assert written["equal"] is True
    assert [(step["step"], step["outcome"]) for step in written["steps"]] == [(3, "equal"), (4, "equal")]


def test_a_difference_comes_after_its_causes_and_ends_the_replay(run_copy, replay, tmp_path):
    run_copy.change_records(code_version="0" * 64, scales_digest="1" * 64)
    code, lines, _ = replay(run_copy.folder, "--from", 1, "--json", tmp_path / "out.json")
    assert code == 1
    assert lines[0].startswith("step 1: different (exact; ")
    assert lines[1].startswith(f"  code version differs: made by {'0' * 16}, this is ")
    assert lines[2].startswith(f"  first difference: scales_digest: {'1' * 16} against ")
    assert len(lines) == 3
    assert json.loads((tmp_path / "out.json").read_text())["equal"] is False
