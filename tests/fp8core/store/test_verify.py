"""Damage of each kind to a copy of a real run, and each is named."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from fp8core.durable import folder_digest
from fp8core.numerics.fingerprint import policy_digest
from fp8core.run.verify import references, verified_bytes, verify
from fp8core.store.artifacts import ArtifactStore, Ref
from fp8core.store.json_text import canonical_json
from fp8core.store.layout import LEDGER
from fp8core.store.ledger import LedgerView, RemovalEntry
from fp8core.store.manifest import StepManifest
from fp8core.store.run_view import Finding, RunView

ZEROS = "0" * 64


@pytest.fixture
def run(small_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_run, tmp_path / "run"))


def findings(run: Path, severity: str = "error") -> list[Finding]:
    return [finding for finding in verify(RunView.read(run)) if finding.severity == severity]


def ref_of(run: Path, step: int, artifact: str) -> Ref:
    return LedgerView.read(run / LEDGER).artifacts(step)[artifact]


def path_of(run: Path, step: int, artifact: str) -> Path:
    return run / ref_of(run, step, artifact).uri


def edit_ledger(run: Path, change: Callable[[dict[str, Any]], bool | None], **wanted: Any) -> None:
    """Change the entries that have the wanted values; those for which `change` returns False are dropped."""
    lines = []
    for line in (run / LEDGER).read_text().splitlines():
        entry = json.loads(line)
        if any(entry.get(key) != value for key, value in wanted.items()) or change(entry) is not False:
            lines.append(json.dumps(entry))
    (run / LEDGER).write_text("".join(f"{line}\n" for line in lines))


def drop(entry: dict[str, Any]) -> bool:
    return False


def set_in(*path: str, value: Any = ZEROS) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        for key in path[:-1]:
            content = content[key]
        content[path[-1]] = value

    return change


def edit_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(path.read_bytes())
    change(content)
    path.write_text(json.dumps(content))


def forge(run: Path, step: int, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a manifest so that file, artifact and the ledger's line agree with one another."""
    file = run / f"manifests/{step:05d}.json"
    edit_json(file, change)
    data = canonical_json(json.loads(file.read_bytes()), "manifest")
    ref = ArtifactStore(run).put_json("manifest", json.loads(data))
    edit_ledger(run, set_in("manifest", value=ref.model_dump()), event="step", step=step)


def test_an_intact_run_has_no_errors_and_its_pruned_checkpoint_is_noted(run: Path) -> None:
    view, read, seen = RunView.read(run), list[int](), list[StepManifest]()
    found = list(verify(view, read.append, seen.append))
    assert [(finding.severity, finding.place) for finding in found] == [("note", "checkpoints")]
    assert sum(read) == verified_bytes(view)
    assert [manifest.record.step for manifest in seen] == [0, 1, 2, 3]
    files = {path for path in (run / "artifacts").rglob("*") if path.is_file()}
    assert {run / reference.ref.uri for reference in references(view)} == files


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-7]), "content differs: SHA-256 "),
        (Path.unlink, "the file is missing"),
    ],
    ids=["truncated", "missing"],
)
def test_a_damaged_artifact_is_named_with_kind_step_and_task(
    run: Path, damage: Callable[[Path], Any], problem: str
) -> None:
    path = path_of(run, 2, "rollouts")
    damage(path)
    (found,) = findings(run)
    assert str(found).startswith(f"error {path.relative_to(run)} (rollouts, step 2, task rollout): {problem}")


def test_what_gc_removed_is_a_note(run: Path) -> None:
    with (run / LEDGER).open("a") as ledger:
        ledger.write(RemovalEntry(steps=[1], when=1.0).model_dump_json() + "\n")
    assert findings(run) == [], "what is there is there"
    refs = [ref_of(run, 1, "prompts"), ref_of(run, 1, "rollouts")]
    for ref in refs:
        (run / ref.uri).unlink()
    assert findings(run) == []
    removed, _ = findings(run, "note")
    size = sum(ref.size for ref in refs)
    assert str(removed) == f"note artifacts (step 1): removed by gc: prompts, rollouts; {size} bytes"
    path_of(run, 2, "rollouts").unlink()
    assert [finding.problem for finding in findings(run)] == ["the file is missing"], "of a step that it left alone"


def test_a_ledger_without_its_last_steps_is_named(run: Path) -> None:
    lines = (run / LEDGER).read_text().splitlines(keepends=True)
    (run / LEDGER).write_text("".join(line for line in lines if '"step":3' not in line.replace(" ", "")))
    (found,) = findings(run)
    assert str(found) == f"error {LEDGER}: its end is cut off: files are of step 3 and later, no line is"


def test_an_edited_manifest_is_named(run: Path) -> None:
    edit_json(run / "manifests/00002.json", set_in("record", "weights_digest"))
    (found,) = findings(run)
    assert str(found) == "error manifests/00002.json (step 2): differs from the manifest that the ledger names"


FORGED = {
    "weights_digest": ("manifests/00002.json", "record.weights_digest: 0000000000000000, by the ledger "),
    "scales_digest": ("manifests/00003.json", "its record names the predecessor "),
    "predecessor": ("manifests/00002.json", "its record names the predecessor 0000000000000000, which is "),
}


@pytest.mark.parametrize("field", FORGED)
def test_a_forged_record_is_named_and_breaks_the_chain(run: Path, field: str) -> None:
    forge(run, 2, set_in("record", field))
    found = [(finding.place, finding.problem) for finding in findings(run)]
    assert any(place == FORGED[field][0] and problem.startswith(FORGED[field][1]) for place, problem in found)
    broken = [place for place, problem in found if "names the predecessor" in problem]
    assert broken[-1] == "manifests/00003.json", "what follows names the record that was"


@pytest.mark.parametrize(
    ("path", "value", "wanted", "problems"),
    [
        ("weights_digest", ZEROS, {"event": "step", "step": 3}, ["record.weights_digest: "]),
        ("outputs.next_policy.size", 5, {"task": "train", "step": 3}, ["record.outputs.train.next_policy: ", "has 97"]),
        ("manifest.digest", ZEROS, {"event": "step", "step": 3}, ["content differs: SHA-256 "]),
        ("digest", ZEROS, {"event": "checkpoint", "step": 3}, ["content differs: digest "]),
        ("weights_digest", ZEROS, {"event": "checkpoint", "step": 3}, ["holds weights 0000000000000000, its step "]),
        ("uri", "../x", {"event": "checkpoint", "step": 3}, ["not a ledger entry: checkpoint.uri: "]),
    ],
)
def test_an_edited_ledger_is_named(
    run: Path, path: str, value: object, wanted: dict[str, Any], problems: list[str]
) -> None:
    edit_ledger(run, set_in(*path.split("."), value=value), **wanted)
    found = [finding.problem for finding in findings(run)]
    for problem in problems:
        assert any(text.startswith(problem) for text in found), found


def order_problems(run: Path) -> list[str]:
    return [finding.problem for finding in findings(run) if finding.place.startswith(LEDGER)]


def test_a_missing_line_of_a_middle_step_is_named(run: Path) -> None:
    edit_ledger(run, drop, event="step", step=2)
    assert set(order_problems(run)) == {"an entry of step 3, expected one of step 2"}
    assert ("checkpoints/00002", "its step is not committed") in [
        (found.place, found.problem) for found in findings(run)
    ]


def test_an_edited_configuration_is_named_once_for_all_steps(run: Path) -> None:
    edit_json(run / "run.json", set_in("config", "training", "learning_rate", value=0.5))
    (found,) = findings(run)
    assert found.place == "run.json"
    assert "the records of steps 0-3 say" in found.problem


def test_a_damaged_checkpoint_is_named(run: Path) -> None:
    file = max((run / "checkpoints/00002").rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    (found,) = findings(run)
    assert str(found).startswith("error checkpoints/00002 (step 2): content differs: digest ")


def test_the_newest_checkpoint_must_be_there(run: Path) -> None:
    shutil.rmtree(run / "checkpoints/00002")
    assert findings(run) == []
    shutil.rmtree(run / "checkpoints/00003")
    (found,) = findings(run)
    assert str(found) == "error checkpoints/00003 (step 3): the folder is missing, and it is the newest checkpoint"
    with (run / LEDGER).open("a") as ledger:
        ledger.write(RemovalEntry(steps=[3], when=1.0).model_dump_json() + "\n")
    assert findings(run) == []


def seal(run: Path, step: int, **fields: str) -> None:
    """Enter the digest of a checkpoint's folder as it is now, as a forger would, and other fields."""
    digest = folder_digest(run / f"checkpoints/{step:05d}")
    edit_ledger(run, lambda entry: entry.update(digest=digest, **fields), event="checkpoint", step=step)


def scale(file: Path, factor: float) -> dict[str, Tensor]:
    scaled = {name: factor * tensor for name, tensor in load_file(file).items()}
    save_file(scaled, file, metadata={"format": "pt"})
    return scaled


def scale_all(checkpoint: Path) -> None:
    scale(checkpoint / "policy/model.safetensors", 2.0)
    digest = policy_digest(scale(checkpoint / "masters.safetensors", 2.0))
    edit_json(checkpoint / "trainer.json", lambda state: state.update(digest=digest))


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda at: scale(at / "policy/model.safetensors", 0.0), "policy: tensor "),
        (lambda at: scale(at / "masters.safetensors", 2.0), "masters.safetensors: its weights have the digest "),
        (scale_all, "trainer.json: digest: "),
    ],
)
def test_exchanged_weights_are_found_though_the_ledger_has_the_digest_of_their_folder(
    run: Path, damage: Callable[[Path], Any], problem: str
) -> None:
    damage(run / "checkpoints/00003")
    seal(run, 3)
    (found,) = findings(run)
    assert str(found).startswith(f"error checkpoints/00003 (step 3): {problem}")
