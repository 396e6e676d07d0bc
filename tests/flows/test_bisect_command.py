import argparse
import json
import shutil
from pathlib import Path

import pytest

from flows.cli.bisect import add_commands
from fp8core.errors import UserError


def bisect(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    add_commands(parser.add_subparsers(required=True))
    options = parser.parse_args(["bisect", *(str(argument) for argument in arguments)])
    return int(options.command(options))


def test_a_run_is_bisected_on_its_last_rollouts(whole_run, tmp_path, capsys):
    assert bisect(whole_run.folder, "--prompts", 3, "--by", "operation", "--json", tmp_path / "b.json") == 0
    out = capsys.readouterr().out
    result = json.loads((tmp_path / "b.json").read_text())
    table = whole_run.store.get_table(whole_run.ledger.artifacts(4)["rollouts"]).to_pylist()
    assert result["tokens"] == sum(len(row["tokens"]) for row in table if row["group"] < 3)
    assert result["compared"] == f"{whole_run.folder}: fp8_block, fp8 cache, against bf16"
    units = [unit["unit"] for unit in result["units"]]
    assert [line.split("  ")[0] for line in out.splitlines()[2:]] == [*units, "total"]
    assert set(units[:5]) == {f"all {part}" for part in ("qkv", "attention", "output", "gate_up", "down")}


def test_the_precision_of_a_run_against_itself_is_exact(whole_run, capsys):
    assert bisect(whole_run.folder, "--against", "fp8_block", "--prompts", 1) == 0
    assert "equal bit for bit" in capsys.readouterr().out
    changed = ["--set", "precision.rollout.kv_cache=bf16"]
    assert bisect(whole_run.folder, "--against", "fp8_block", "--prompts", 1, *changed) == 0
    assert "fp8_block, bf16 cache, against fp8_block" in capsys.readouterr().out


def test_mistakes_are_one_line(whole_run, tmp_path):
    with pytest.raises(UserError, match=r"nothing: no run \(no run.json in "):
        bisect("nothing")
    with pytest.raises(UserError, match=r"--json .*absent/b\.json: cannot be written"):
        bisect(whole_run.folder, "--json", tmp_path / "absent" / "b.json")
    copied = Path(shutil.copytree(whole_run.folder, tmp_path / "copied"))
    shutil.rmtree(copied / "checkpoints")
    with pytest.raises(UserError, match="no checkpoint yet"):
        bisect(copied)
    with pytest.raises(SystemExit):
        bisect(whole_run.folder, "--prompts", 0)
