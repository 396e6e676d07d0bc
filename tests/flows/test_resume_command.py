"""`fp8-grpo resume`: from what the folder says, wherever it lies; every refusal is one line before anything starts."""

import json
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flows import cli
from flows.run_lookup import load_settings
from flows.tracking.store import default_tracking_uri
from fp8core.errors import UserError
from fp8core.report.run_data import read_run
from fp8core.store.layout import LEDGER
from fp8core.store.ledger import LedgerView
from fp8core.store.manifest import StepManifest, current_code, record_digest

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(
    prefect_server: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Command]:
    """Call fp8-grpo in this process, in an empty folder; returns its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = signal.getsignal(signal.SIGTERM)
    yield lambda *arguments: (cli.main(arguments), *capsys.readouterr())
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module")
def begun(launch: Any, mlflow_store: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of two steps, in a folder of runs of its own."""
    return launch("begun", steps=2, overrides={"runs": str(mlflow_store(tmp_path_factory.mktemp("begun")))})


@pytest.fixture
def moved(begun: Any, tmp_path: Path) -> Path:
    """A copy of the run under another name in another folder of runs."""
    return Path(shutil.copytree(begun.folder, tmp_path / "elsewhere" / "renamed"))


@pytest.mark.slow
def test_a_moved_run_is_extended_in_its_mlflow_run(
    launch: Any,
    command: Command,
    mlflow_store: Callable[[Path], Path],
    whole_run: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    begun = launch("to-be-moved", steps=2, overrides={"runs": str(mlflow_store(tmp_path / "begun"))})
    capsys.readouterr()
    (tmp_path / "elsewhere").mkdir()
    moved = begun.folder.rename(tmp_path / "elsewhere" / "renamed")
    words = ("resume", str(moved), "--set", "steps=3", "--json", "summary.json")
    code, _, err = command(*words)
    assert code == 1, "its store is no longer beside it"
    uri = default_tracking_uri(begun.runs)
    assert f"tracking.uri {uri}: only the run's folder {moved} names this store" in err
    code, out, err = command(*words, "--set", f"tracking.uri={uri}")
    assert (code, err) == (0, "")
    assert out.startswith("starting Prefect and MLflow\nfp8-grpo run renamed\n")
    assert "continues after step 2; 0 updates redone" in out
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["weights_digest"] == whole_run.ledger.steps()[3].weights_digest, "that of a run never continued"
    assert summary["mlflow_run_id"] == begun.mlflow_run().info.run_id
    tip = f"3:{record_digest(StepManifest.model_validate_json((moved / 'manifests/00003.json').read_bytes()))}"
    assert summary["chain_tip"] == begun.mlflow_run().data.tags["chain_tip"] == tip
    assert f"  chain       {tip}\n" in out
    assert [path.name for path in moved.parent.iterdir()] == ["renamed"], "no second MLflow store"


def test_an_extended_run_goes_on_to_its_new_end(run_copy: Any) -> None:
    run_copy.resume(steps=6)
    run_copy.cut_after(6, "rollout")
    assert [load_settings(str(run_copy.folder), given).steps for given in ({}, {"steps": 7}, ["steps=5"])] == [6, 7, 5]
    assert read_run(run_copy.folder, "extended").status == "5 of 6 steps"
    run_copy.resume(steps=6)
    extended = read_run(run_copy.folder, "extended")
    assert extended.status == "finished, 6 steps"
    with pytest.raises(UserError, match=r"has step 6 already, and steps=5 asks for fewer"):
        run_copy.resume(steps=5)


@pytest.mark.slow
def test_relative_paths_are_those_of_the_folder_it_was_begun_in(
    small_checkpoint: Path,
    command: Command,
    mlflow_store: Callable[[Path], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    home, other = tmp_path / "home", tmp_path / "other"
    mlflow_store(home / "runs")
    other.mkdir()
    shutil.copytree(small_checkpoint, home / "model")
    rows = [json.dumps({"question": f"What is {n} and 7?", "answer": f"#### {n + 7}"}) for n in range(24)]
    (home / "rows.jsonl").write_text("\n".join(rows))
    (home / "judge.py").write_text("def score(prompt, completion, answer, finish):\n    return 1.0\n")
    small = ["rollout.prompts_per_step=2", "rollout.group_size=2", "rollout.max_new_tokens=4", "evaluation.prompts=1"]
    own = ["model=model", "data.source=rows.jsonl", "reward.verifier=judge.py:score"]
    settings = [*own, "run=relative", "steps=1", *small]
    monkeypatch.chdir(home)
    code, _, err = command("run", "gsm8k", *(flag for setting in settings for flag in ("--set", setting)))
    assert (code, err) == (0, "")

    def ask(name: str, *arguments: str) -> None:
        monkeypatch.chdir(other)
        code, _, err = command(name, "../home/runs/relative", *arguments, "--trust")
        assert code == 0, err

    ask("resume", "--set", "steps=2", "--json", "summary.json")
    assert json.loads((other / "summary.json").read_text())["steps"] == 2
    assert LedgerView.read(home / "runs" / "relative" / LEDGER).last_step() == 2
    ask("export", "exported", "--step", "1")
    assert (other / "exported" / "config.json").is_file()
    ask("evaluate", "--json", "held_out.json")
    assert json.loads((other / "held_out.json").read_text())["prompts"] == 1


def test_new_code_goes_on_from_what_is_committed(begun: Any, moved: Path, command: Command) -> None:
    for path in (moved / LEDGER, moved / "run.json"):
        path.write_text(path.read_text().replace(current_code(), "0" * 64))
    before = LedgerView.read(moved / LEDGER)
    store = f"tracking.uri={default_tracking_uri(begun.runs)}"
    code, _, err = command("resume", str(moved), "--new-code", "--set", "steps=3", "--set", store)
    assert (code, err) == (0, "")
    ledger = LedgerView.read(moved / LEDGER)
    assert ledger.segments()[:-1] == before.segments()
    assert ledger.segments()[-1].code_version == current_code()
    assert [ledger.tasks(step) for step in range(3)] == [before.tasks(step) for step in range(3)]
