"""The tip of a run's chain in MLflow finds a folder that was rewritten."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from flows.cli import main
from flows.tracking.record import read_record
from flows.tracking.store import default_tracking_uri
from fp8core.store.artifacts import ArtifactStore
from fp8core.store.layout import LEDGER
from fp8core.store.manifest import ChainTip, StepManifest


def tips(folder: Path) -> list[ChainTip]:
    files = sorted((folder / "manifests").glob("[0-9]????.json"))
    return [ChainTip.of(StepManifest.model_validate_json(file.read_bytes())) for file in files]


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the records of a run so that all that its folder says agrees: digests, chain, ledger, both copies."""
    store, predecessor = ArtifactStore(folder), None
    refs = {}
    for file in sorted((folder / "manifests").glob("[0-9]????.json")):
        content = json.loads(file.read_bytes())
        change(content["record"])
        content["record"]["predecessor"] = predecessor
        manifest = StepManifest.model_validate_json(json.dumps(content))
        predecessor = ChainTip.of(manifest).digest
        refs[manifest.record.step] = store.put_json("manifest", manifest.model_dump(mode="json"))
        file.write_text(manifest.model_dump_json(indent=2) + "\n")
    lines = [json.loads(line) for line in (folder / LEDGER).read_text().splitlines()]
    for entry in lines:
        if entry["event"] == "step":
            entry["manifest"] = refs[entry["step"]].model_dump()
    (folder / LEDGER).write_text("".join(f"{json.dumps(entry)}\n" for entry in lines))


def other_library(record: dict[str, Any]) -> None:
    record["versions"]["torch"] = "1.0"


def verify(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str | None, list[str]]:
    """Exit code, the line about MLflow, and the findings about it."""
    capsys.readouterr()
    code = main(["verify", *map(str, arguments)])
    lines = capsys.readouterr().out.splitlines()
    told = next((line[16:] for line in lines if line.startswith(f"{'MLflow':<16}")), None)
    return code, told, [line for line in lines if line.startswith(("error MLflow", "note MLflow"))]


@pytest.fixture
def published(copy_of_trained: Any, runs: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A finished training of three steps that MLflow knows, in a store that the environment names."""
    copy = copy_of_trained(default_tracking_uri(runs))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", default_tracking_uri(runs))
    assert copy.publish() == ""
    return copy


def test_mlflow_holds_the_head_and_verify_compares_it(published, capsys) -> None:
    before = tips(published.folder)[-2]
    record = read_record(published.folder).mlflow
    place = f"MLflow run {record.run_id} in {record.uri}"
    assert verify(capsys, published.folder) == (0, f"the same tip in {place}", [])
    MlflowClient(record.uri).set_tag(record.run_id, "chain_tip", str(before))
    code, told, found = verify(capsys, published.folder)
    assert (code, found) == (0, [])
    assert told is not None
    assert told.startswith(f"{place} holds an earlier one, {before} of 3: ")


def test_a_run_that_was_rewritten_consistently_is_found(published, runs, capsys) -> None:
    tip = tips(published.folder)[-1]
    rewrite(published.folder, other_library)
    code, _, (found,) = verify(capsys, published.folder)
    assert code == 1
    assert f"was told the record {tip}, this folder has " in found
    MlflowClient(default_tracking_uri(runs)).set_tag(
        read_record(published.folder).mlflow.run_id, "chain_tip", f"9:{64 * 'a'}"
    )
    code, _, (found,) = verify(capsys, published.folder)
    assert code == 1
    assert found.endswith("this folder ends with step 3: the last steps were cut off, or an older copy was put back")
