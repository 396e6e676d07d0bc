"""The head of the chain in MLflow, and which folder an MLflow run belongs to."""

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from mlflow import MlflowClient

from flows.cli import main
from flows.tracking.record import mark_killed, read_record, write_record
from flows.tracking.session import open_session
from flows.tracking.store import default_tracking_uri
from flows.tracking.tracker import TRAINING
from fp8core.config.load import load_config, reload_config
from fp8core.errors import UserError
from fp8core.report.console import Console
from fp8core.run.checks.settings import graph_of
from fp8core.run.execute import carried
from fp8core.run.loop import begin, iterate
from fp8core.run.open import open_directory, open_run, signing_key
from fp8core.store.artifacts import ArtifactStore
from fp8core.store.layout import LEDGER
from fp8core.store.manifest import Head, StepManifest, read_signature, signature_file
from fp8core.store.run_directory import read_description


def publish(copy: Any) -> list[str]:
    """Open a training whose steps are done, and close it; returns what the console said after its header."""
    out = io.StringIO()
    with open_session(copy.config, copy.folder.name, Console(out, copy.config.steps)) as session:
        session.mlflow.follow_ledger()
        session.publisher.wake()
    return out.getvalue().splitlines()[3:]


def at(copy: Any, folder: Path) -> Any:
    """The same training where its folder lies now."""
    return copy._replace(
        config=copy.config.model_copy(update={"runs": folder.parent, "run": folder.name}), folder=folder
    )


def heads(folder: Path) -> list[Head]:
    files = sorted((folder / "manifests").glob("[0-9]????.json"))
    return [Head.of(StepManifest.model_validate_json(file.read_bytes())) for file in files]


def mlflow_run(folder: Path) -> Any:
    record = read_record(folder)
    assert record is not None
    return MlflowClient(record.uri).get_run(record.run_id)


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


def verify(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, str], list[str]]:
    """Exit code, the lines about anchors by name, and the findings."""
    capsys.readouterr()
    code = main(["verify", *map(str, arguments)])
    printed = capsys.readouterr()
    assert printed.err == ""
    lines = printed.out.splitlines()
    names = ("MLflow", "--head", "signatures")
    anchors = {name: line[16:] for line in lines for name in names if line.startswith(f"{name:<16}")}
    return code, anchors, [line for line in lines if line.startswith(("error", "note")) and "checkpoints: " not in line]


@pytest.fixture
def published(copy_of_trained: Any, runs: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A finished training of three steps that MLflow knows, in a store that the environment names."""
    copy = copy_of_trained(default_tracking_uri(runs))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", default_tracking_uri(runs))
    assert publish(copy) == []
    return copy


# --- the head ---


def test_mlflow_holds_the_head_and_verify_compares_it(published, capsys) -> None:
    *_, before, head = heads(published.folder)
    assert mlflow_run(published.folder).data.tags["chain_head"] == str(head)
    place = f"MLflow run {read_record(published.folder).run_id} in {published.config.tracking.uri}"
    assert verify(capsys, published.folder)[:2] == (0, {"MLflow": f"the same head in {place}", "signatures": "none"})
    record = read_record(published.folder)
    MlflowClient(record.uri).set_tag(record.run_id, "chain_head", str(before))
    code, anchors, found = verify(capsys, published.folder, "--head", head.digest[:20])
    behind = "of 3: everything up to it is as it was, of step 3 it says nothing"
    assert (code, found) == (0, [])
    assert anchors["MLflow"] == f"{place} holds an earlier one, {before} {behind}; the publisher had come no further"
    assert anchors["--head"] == "is the record of step 3, the last one"


def test_a_run_that_was_rewritten_consistently_is_found_by_each_anchor(published, capsys, tmp_path) -> None:
    head = heads(published.folder)[-1]
    rewrite(published.folder, other_library)
    code, _, (found,) = verify(capsys, published.folder)
    assert code == 1
    assert found.startswith("error MLflow (step 3): MLflow run ")
    assert f"was told the record {head}, this folder has " in found
    assert verify(capsys, published.folder, "--head", head)[2][1] == f"error --head: {head} is no record of this chain"
    with pytest.raises(UserError, match=r"its record of step 3 is not the one that .*: the run was rewritten"):
        publish(published)
    assert mlflow_run(published.folder).data.tags["chain_head"] == str(head), "nothing wrote over it"


def test_steps_that_were_cut_off_are_found(published, capsys) -> None:
    cut_after(published.folder, 2)
    code, _, found = verify(capsys, published.folder)
    assert code == 1
    assert next(line for line in found if "MLflow" in line).endswith(
        "this folder ends with step 2: the last steps were cut off, or an older copy was put back"
    )


def test_verify_says_why_it_could_not_compare(published, runs, capsys, monkeypatch) -> None:
    record = read_record(published.folder)
    client = MlflowClient(record.uri)

    def said(**fields: Any) -> str:
        write_record(published.folder, record.changed(**fields))
        monkeypatch.setenv("MLFLOW_TRACKING_URI", fields.get("uri", record.uri))
        code, anchors, (found,) = verify(capsys, published.folder)
        assert (code, list(anchors)) == (0, ["signatures"])
        return found.removeprefix("note MLflow: its head could not be compared: ")

    assert said(uri=f"sqlite:///{runs / 'gone.db'}").endswith("gone.db: there is no such database")
    assert "refused" in said(uri="http://127.0.0.1:9")
    (runs / "other.db").write_bytes(b"")
    assert "other.db: not a store of MLflow: no such table" in said(uri=f"sqlite:///{runs / 'other.db'}")
    assert (runs / "other.db").read_bytes() == b"", "MLflow would make one of it"
    assert "neither a server nor a database" in said(uri=str(runs / "made"))
    assert not (runs / "made").exists()
    assert "not found" in said(run_id="0" * 32)
    client.delete_tag(record.run_id, "chain_head")
    assert "holds no head: nothing was published" in said()
    client.set_tag(record.run_id, "chain_head", "3:x")
    assert said().endswith("'3:x' is not the head of a chain (STEP:DIGEST)")


def test_a_run_that_lost_its_record_of_mlflow_is_found_there_by_its_id(published, capsys) -> None:
    (published.folder / "tracking.json").unlink()
    configured(published)
    assert verify(capsys, published.folder)[1]["MLflow"].startswith("the same head in MLflow run ")
    rewrite(published.folder, other_library)
    code, _, (found,) = verify(capsys, published.folder)
    assert (code, found.startswith("error MLflow (step 3): ")) == (1, True)
    configured(published, id="0" * 32)
    (found,) = verify(capsys, published.folder)[2]
    assert found.endswith(f"no MLflow run with the id of this run in {published.config.tracking.uri}")


def configured(copy: Any, **fields: str) -> None:
    """Let run.json say where this copy is published, as a run's own does."""
    described = json.loads((copy.folder / "run.json").read_bytes())
    described["config"]["tracking"] = copy.config.tracking.model_dump(mode="json")
    (copy.folder / "run.json").write_text(json.dumps({**described, **fields}))


def test_another_store_than_the_folder_names_can_be_asked_and_none(published, runs, capsys, monkeypatch) -> None:
    rewrite(published.folder, other_library)
    configured(published)
    uri = published.config.tracking.uri
    own = f"sqlite:///{runs / 'own.db'}"
    write_record(published.folder, read_record(published.folder).changed(uri=own))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", own)
    assert verify(capsys, published.folder)[0] == 0
    assert verify(capsys, published.folder, "--tracking-uri", uri)[0] == 1
    assert verify(capsys, published.folder, "--tracking-uri", "none") == (0, {"signatures": "none"}, [])


@pytest.mark.slow
def test_an_outage_at_the_start_does_not_let_a_rewritten_run_through(copy_of_trained, network, monkeypatch) -> None:
    monkeypatch.setattr("flows.tracking.session.RETRY_SECONDS", (0.05,))
    copy = copy_of_trained(network.uri)
    publish(copy)
    rewrite(copy.folder, other_library)
    network.unplug()
    with pytest.raises(UserError, match="the run was rewritten"):
        publish_when_back(copy, network)


def publish_when_back(copy: Any, network: Any) -> None:
    with open_session(copy.config, copy.folder.name, Console(io.StringIO(), 3)) as session:
        network.plug_in()
        session.publisher.close()


# --- copies ---


def test_a_moved_and_renamed_run_stays_in_its_mlflow_run(published, tmp_path) -> None:
    first = read_record(published.folder).run_id
    moved = published.folder.rename(tmp_path / "renamed")
    assert publish(at(published, moved)) == []
    record = read_record(moved)
    assert (record.run_id, record.place.path) == (first, str(moved))


def test_a_copy_gets_an_mlflow_run_of_its_own_and_both_name_each_other(published, capsys, shown) -> None:
    copy = at(published, Path(shutil.copytree(published.folder, published.folder.with_name("copy"))))
    first, before = read_record(published.folder).run_id, shown(published.config).runs
    (line,) = publish(copy)
    own = read_record(copy.folder).run_id
    assert own != first
    assert line == (
        f"this folder is a copy of {published.folder}: it gets an MLflow run of its own, {own} (copied_from {first})"
    )
    ours, theirs = mlflow_run(copy.folder), mlflow_run(published.folder)
    assert (ours.data.tags["copied_from"], theirs.data.tags["copied_to"]) == (first, own)
    assert ours.data.tags["chain_head"] == theirs.data.tags["chain_head"]
    assert ours.data.metrics == theirs.data.metrics
    assert (ours.info.run_name, ours.info.status) == ("copy", "FINISHED")
    assert before[0]["metrics"] in [run["metrics"] for run in shown(published.config).runs], "once each"
    assert publish(copy) == [], "it has its own now"
    assert read_record(copy.folder).run_id == own
    again = at(published, Path(shutil.copytree(copy.folder, copy.folder.with_name("again"))))
    publish(again)
    assert mlflow_run(again.folder).data.tags["copied_from"] == own


@pytest.mark.slow
def test_a_copy_of_a_run_of_an_older_version_is_told_by_the_folder_that_mlflow_names(published) -> None:
    write_record(published.folder, read_record(published.folder).changed(place=None))
    copy = at(published, Path(shutil.copytree(published.folder, published.folder.with_name("copy"))))
    assert publish(copy)[0].startswith(f"this folder is a copy of {published.folder}: ")
    assert publish(published) == []
    assert read_record(published.folder).run_id != read_record(copy.folder).run_id


@pytest.mark.slow
def test_a_killed_copy_does_not_show_its_original_as_killed(published) -> None:
    record = read_record(published.folder).running()
    write_record(published.folder, record)
    MlflowClient(record.uri).update_run(record.run_id, "RUNNING")
    copy = Path(shutil.copytree(published.folder, published.folder.with_name("copy")))
    assert not mark_killed(copy)
    assert mlflow_run(published.folder).info.status == "RUNNING"
    assert mark_killed(published.folder)


def test_a_backup_whose_run_went_on_gets_an_mlflow_run_of_its_own(published, tmp_path) -> None:
    first, rows = read_record(published.folder).run_id, mlflow_run(published.folder).data.metrics
    cut_after(published.folder, 2)
    (line,) = publish(published)
    own = read_record(published.folder).run_id
    assert line == (
        f"MLflow run {first} went on to step 3 elsewhere, this folder ends with step 2: it gets an MLflow run of its "
        f"own, {own} (copied_from {first})"
    )
    assert mlflow_run(published.folder).data.tags["chain_head"] == str(heads(published.folder)[2])
    assert MlflowClient(published.config.tracking.uri).get_run(first).data.metrics == rows


def test_a_run_that_its_store_lost_gets_a_new_one_with_everything(published) -> None:
    """As after `rm runs/mlflow.db`, of which this process would hold the file open."""
    first, before = read_record(published.folder), mlflow_run(published.folder)
    MlflowClient(first.uri).delete_tag(first.run_id, TRAINING)
    lost = "0" * 32
    write_record(published.folder, first.changed(run_id=lost))
    (line,) = publish(published)
    own = read_record(published.folder).run_id
    assert own not in (lost, first.run_id)
    assert line == f"MLflow has lost run {lost}: run {own} gets everything from step 0 on"
    after = mlflow_run(published.folder)
    assert after.data.metrics == before.data.metrics
    assert (after.data.tags["chain_head"], after.info.status) == (before.data.tags["chain_head"], "FINISHED")
    assert publish(published) == []


@pytest.mark.slow
def test_a_copy_needs_its_server_as_a_new_run_does(copy_of_trained, network) -> None:
    copy = copy_of_trained(network.uri)
    publish(copy)
    second = at(copy, Path(shutil.copytree(copy.folder, copy.folder.with_name("copy"))))
    network.unplug()
    with pytest.raises(UserError, match=r"^tracking\.uri .*refused"):
        publish(second)
    assert read_record(second.folder) == read_record(copy.folder)
    network.plug_in()
    publish(second)
    assert mlflow_run(second.folder).data.tags["copied_from"] == read_record(copy.folder).run_id


# --- signatures ---


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """A private key; its public one lies beside it."""
    private, path = Ed25519PrivateKey.generate(), tmp_path / "key.pem"
    path.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    path.with_suffix(".pub").write_bytes(
        private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    )
    return path


def continue_to(step: int, folder: Path, key: Path | None) -> None:
    described = read_description(folder)
    assert described is not None
    chosen = {"runs": str(folder.parent), "artifacts.signing_key": None if key is None else str(key)}
    config = reload_config(described.config, chosen)
    with (
        open_directory(config, folder.name) as directory,
        open_run(config, graph_of(config), directory, Console(io.StringIO(), 3), signing_key(config, "x")) as run,
    ):
        begin(run)
        iterate(run, step, carried(run, step))


def test_a_signed_step_has_the_record_of_an_unsigned_one_and_its_signature_is_checked(
    copy_of_trained, trained, runs, key, capsys
) -> None:
    copy = copy_of_trained(default_tracking_uri(runs))
    cut_after(copy.folder, 1)
    signature_file(copy.folder, 2).write_text("left by a killed process that had a key")
    continue_to(2, copy.folder, None)
    continue_to(3, copy.folder, key)
    assert heads(copy.folder) == heads(trained), "resumed with a key, bit for bit"
    signature = read_signature(copy.folder, 3)
    assert signature is not None
    assert read_signature(copy.folder, 2) is None
    code, anchors, found = verify(capsys, copy.folder)
    assert code == 0
    assert anchors["signatures"].startswith(f"steps 3 by key {signature.fingerprint}; not trusted")
    assert "steps 0-2 have none that holds; that of step 3 vouches for them by the chain" in found[-1]
    public = ["--public-key", key.with_suffix(".pub")]
    assert verify(capsys, copy.folder, *public)[:2] == (0, {"signatures": f"steps 3 by key {signature.fingerprint}"})
    artifacts = copy.config.artifacts.model_copy(update={"signing_key": key})
    publish(copy._replace(config=copy.config.model_copy(update={"artifacts": artifacts})))
    assert mlflow_run(copy.folder).data.tags["signed_by"] == signature.fingerprint
    secret = key.read_text().splitlines()[1]
    files = [file for folder in (copy.folder, runs) for file in folder.rglob("*") if file.is_file()]
    assert not [file for file in files if secret.encode() in file.read_bytes()]
    rewrite(copy.folder, other_library)
    public += ["--tracking-uri", "none"]
    code, _, found = verify(capsys, copy.folder, *public)
    assert code == 1
    assert any("00003.signature.json (step 3): it signs the record" in line for line in found)
    signature_file(copy.folder, 3).unlink()
    assert verify(capsys, copy.folder, *public[2:])[0] == 0, (
        "who does not ask for signatures is not told of their absence"
    )
    code, _, found = verify(capsys, copy.folder, *public)
    assert code == 1
    assert found[-1] == "error signatures: steps 0-3 have none that holds, and no later step has one"


def test_a_key_that_cannot_be_used_is_one_line_before_any_work(settings, tmp_path, capsys) -> None:
    chosen = {**settings, "runs": str(tmp_path / "runs"), "run": "signed"}

    def refused(path: str) -> str:
        overrides = [
            f"--set={key}={json.dumps(value)}" for key, value in {**chosen, "artifacts.signing_key": path}.items()
        ]
        assert main(["run", "tiny", *overrides]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert not (tmp_path / "runs").exists()
        (line,) = printed.err.splitlines()
        return line.removeprefix("fp8-grpo: artifacts.signing_key")

    assert refused(str(tmp_path / "absent.pem")) == f" {tmp_path}/absent.pem: cannot be read: No such file or directory"
    text = refused("-----BEGIN PRIVATE KEY-----\nc2VjcmV0\n-----END PRIVATE KEY-----")
    assert text.startswith(": takes the path of a file, not the key itself")
    assert "c2VjcmV0" not in text
    inside = str(tmp_path / "runs" / "signed" / "key.pem")
    assert refused(inside).endswith("it lies in the run's own folder, which others get to see")


def test_a_replay_needs_no_key_though_the_run_had_one(settings, key) -> None:
    config = load_config("tiny", {**settings, "artifacts.signing_key": str(key)})
    key.unlink()
    graph_of(config)
    with pytest.raises(UserError, match="cannot be read"):
        signing_key(config, "x")
