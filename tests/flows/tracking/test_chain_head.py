"""The head of a run's chain in MLflow finds a folder that was rewritten."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from flows.cli import main
from flows.tracking.record import read_record, write_record
from flows.tracking.store import default_tracking_uri
from fp8core.errors import UserError
from fp8core.store.artifacts import ArtifactStore
from fp8core.store.layout import LEDGER
from fp8core.store.manifest import Head, StepManifest


def heads(folder: Path) -> list[Head]:
    files = sorted((folder / "manifests").glob("[0-9]????.json"))
    return [Head.of(StepManifest.model_validate_json(file.read_bytes())) for file in files]


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the records of a run so that all that its folder says agrees: digests, chain, ledger, both copies."""
    store, predecessor = ArtifactStore(folder), None
    refs = {}
    for file in sorted((folder / "manifests").glob("[0-9]????.json")):
        content = json.loads(file.read_bytes())
        change(content["record"])
        content["record"]["predecessor"] = predecessor
        manifest = StepManifest.model_validate_json(json.dumps(content))
        predecessor = Head.of(manifest).digest
        refs[manifest.record.step] = store.put_json("manifest", manifest.model_dump(mode="json"))
        file.write_text(manifest.model_dump_json(indent=2) + "\n")
    lines = [json.loads(line) for line in (folder / LEDGER).read_text().splitlines()]
    for entry in lines:
        if entry["event"] == "step":
            entry["manifest"] = refs[entry["step"]].model_dump()
    (folder / LEDGER).write_text("".join(f"{json.dumps(entry)}\n" for entry in lines))


def other_library(record: dict[str, Any]) -> None:
    record["versions"]["torch"] = "1.0"


def cut_after(folder: Path, step: int) -> None:
    """As the folder was when a step had been committed."""
    lines = (folder / LEDGER).read_text().splitlines(keepends=True)
    last = next(i for i, line in enumerate(lines) if f'"event":"step","step":{step},' in line)
    (folder / LEDGER).write_text("".join(lines[: last + 1]))


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


def tags(folder: Path) -> dict[str, str]:
    record = read_record(folder)
    assert record is not None
    return dict(MlflowClient(record.uri).get_run(record.run_id).data.tags)


def test_mlflow_holds_the_head_and_verify_compares_it(published, capsys) -> None:
    *_, before, head = heads(published.folder)
    assert tags(published.folder)["chain_head"] == str(head)
    record = read_record(published.folder)
    place = f"MLflow run {record.run_id} in {record.uri}"
    assert verify(capsys, published.folder) == (0, f"the same head in {place}", [])
    MlflowClient(record.uri).set_tag(record.run_id, "chain_head", str(before))
    code, told, found = verify(capsys, published.folder)
    assert (code, found) == (0, [])
    assert told is not None
    assert told.startswith(f"{place} holds an earlier one, {before} of 3: ")


def test_a_run_that_was_rewritten_consistently_is_found_and_written_no_further(published, capsys) -> None:
    head = heads(published.folder)[-1]
    rewrite(published.folder, other_library)
    code, _, (found,) = verify(capsys, published.folder)
    assert code == 1
    assert f"was told the record {head}, this folder has " in found
    assert verify(capsys, published.folder, "--tracking-uri", "none")[::2] == (0, [])
    with pytest.raises(UserError, match=r"its record of step 3 is not the one that .*: the run was rewritten"):
        published.publish()
    assert tags(published.folder)["chain_head"] == str(head), "nothing wrote over it"


def test_steps_that_were_cut_off_are_found_and_not_published_twice(published, capsys, shown) -> None:
    rows = shown(published.config).runs[0]["metrics"]
    complete = (published.folder / LEDGER).read_bytes()
    cut_after(published.folder, 2)
    code, _, (found,) = verify(capsys, published.folder)
    assert code == 1
    assert found.endswith("this folder ends with step 2: the last steps were cut off, or an older copy was put back")
    write_record(published.folder, read_record(published.folder).changed(published=2, models=2))
    with published.session() as (session, _):
        pass
    assert session.mlflow.published == 3, "a resume makes step 3 again, with the same bytes"
    (published.folder / LEDGER).write_bytes(complete)
    published.publish()
    assert shown(published.config).runs[0]["metrics"] == rows


def test_verify_says_why_it_could_not_compare(published, runs, capsys, monkeypatch) -> None:
    record = read_record(published.folder)
    client = MlflowClient(record.uri)

    def said(**fields: Any) -> str:
        write_record(published.folder, record.changed(**fields))
        monkeypatch.setenv("MLFLOW_TRACKING_URI", fields.get("uri", record.uri))
        code, told, (found,) = verify(capsys, published.folder)
        assert (code, told) == (0, None)
        return found.removeprefix("note MLflow: its head could not be compared: ")

    assert said(uri=f"sqlite:///{runs / 'gone.db'}").endswith("gone.db: there is no such database")
    assert not (runs / "gone.db").exists()
    assert "refused" in said(uri="http://127.0.0.1:9")
    assert "not found" in said(run_id="0" * 32)
    client.delete_tag(record.run_id, "chain_head")
    assert "holds no head: nothing was published" in said()
    client.set_tag(record.run_id, "chain_head", "3:x")
    assert said().endswith("'3:x' is not the head of a chain (STEP:DIGEST)")
