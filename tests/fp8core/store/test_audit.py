"""Damage of each kind to a copy of a real run, and each is named."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8core.errors import UserError
from fp8core.store.artifacts import ArtifactStore, Ref, canonical_json
from fp8core.store.audit import audit
from fp8core.store.audit_files import audited_bytes, references
from fp8core.store.evidence import Finding, collect, spans
from fp8core.store.ledger import LedgerView, RedoEntry
from fp8core.store.manifest import StepManifest
from fp8core.store.run_directory import LEDGER
from fp8core.store.tombstones import Tombstone, bury

OTHER = "0" * 64


@pytest.fixture
def run(small_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_run, tmp_path / "run"))


def findings(run: Path, severity: str = "error") -> list[Finding]:
    return [finding for finding in audit(collect(run)) if finding.severity == severity]


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


def set_in(*path: str, value: Any = OTHER) -> Callable[[dict[str, Any]], None]:
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


# --- an intact run ---


def test_an_intact_run_has_no_errors_and_its_pruned_checkpoint_is_noted(run: Path) -> None:
    evidence, read, seen = collect(run), list[int](), list[StepManifest]()
    found = list(audit(evidence, read.append, seen.append))
    assert [str(finding) for finding in found] == ["note checkpoints: pruned, as later ones replace them: steps 1"]
    assert sum(read) == audited_bytes(evidence)
    assert [manifest.record.step for manifest in seen] == [0, 1, 2, 3]
    files = {path for path in (run / "artifacts").rglob("*") if path.is_file()}
    assert {run / reference.ref.uri for reference in references(evidence)} == files


def test_what_a_live_run_has_not_committed_is_no_error(run: Path) -> None:
    lines = (run / LEDGER).read_text().splitlines(keepends=True)
    (end,) = [i for i, line in enumerate(lines) if '"event":"step","step":3' in line]
    (run / LEDGER).write_text("".join(lines[:end]) + lines[end][:40])
    evidence = collect(run)
    assert list(evidence.steps) == [0, 1, 2]
    assert [finding.place for finding in audit(evidence) if finding.severity == "error"] == []


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no run \(no run\.json\)$"):
        collect(tmp_path)


# --- artifacts ---


def test_a_truncated_artifact_is_named_with_kind_step_and_task(run: Path) -> None:
    path = path_of(run, 2, "rollouts")
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-7])
    place = path.relative_to(run)
    assert [str(finding) for finding in findings(run)] == [
        f"error {place} (rollouts, step 2, task rollout): truncated: {size - 7} of {size} bytes"
    ]


@pytest.mark.parametrize("position", [0, -1])
def test_a_flipped_bit_is_named(run: Path, position: int) -> None:
    path = path_of(run, 1, "logprobs")
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)
    (found,) = findings(run)
    assert (found.place, found.step, found.task, found.kind) == (
        str(path.relative_to(run)), 1, "logprobs", "logprobs",
    )  # fmt: skip
    digest = hashlib.sha256(content).hexdigest()
    assert found.problem == (
        f"content differs: SHA-256 {digest[:16]} of {len(content)} bytes, "
        f"expected {path.stem[:16]} of {len(content)} bytes"
    )


def test_a_deleted_artifact_is_named(run: Path) -> None:
    path_of(run, 3, "train_report").unlink()
    (found,) = findings(run)
    assert str(found).endswith("(train_report, step 3, task train): the file is missing")


def test_two_swapped_artifacts_are_named_each_with_what_it_holds(run: Path) -> None:
    one, two = path_of(run, 1, "rewards"), path_of(run, 2, "rewards")
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)
    places = [str(path.relative_to(run)) for path in (one, two)]
    assert [str(finding) for finding in findings(run)] == [
        f"error {places[0]} (rewards, step 1, task reward): "
        f"holds the content of {places[1]} (rewards, step 2, task reward)",
        f"error {places[1]} (rewards, step 2, task reward): "
        f"holds the content of {places[0]} (rewards, step 1, task reward)",
    ]


def test_an_unreadable_artifact_is_named(run: Path) -> None:
    path = path_of(run, 2, "rollouts")
    path.unlink()
    path.mkdir()
    (found,) = findings(run)
    assert str(found).endswith("(rollouts, step 2, task rollout): cannot be read: Is a directory")


def test_what_retention_removed_is_a_note_with_reason_and_date(run: Path) -> None:
    refs = [ref_of(run, 1, "prompts"), ref_of(run, 1, "rollouts")]
    when = "2026-01-02T03:04:05+00:00"
    bury(run, [Tombstone(**ref.model_dump(), step=1, reason="step 1 is not kept", when=when) for ref in refs])
    assert findings(run) == [], "what is there is there"
    for ref in refs:
        (run / ref.uri).unlink()
    assert findings(run) == []
    removed, _ = findings(run, "note")
    size = sum(ref.size for ref in refs)
    assert str(removed) == (
        f"note artifacts (step 1): removed (step 1 is not kept, {when}): prompts, rollouts; {size} bytes"
    )


def test_a_removed_manifest_artifact_leaves_its_file_to_check_the_chain_with(run: Path) -> None:
    ref = LedgerView.read(run / LEDGER).steps()[1].manifest
    (run / ref.uri).unlink()
    assert [finding.problem for finding in findings(run)] == ["the file is missing"]
    bury(run, [Tombstone(**ref.model_dump(), step=1, reason="r", when="w")])
    assert findings(run) == []
    edit_json(run / "manifests/00001.json", set_in("record", "weights_digest"))
    assert [str(finding) for finding in findings(run)] == [
        "error manifests/00001.json (step 1): differs from the manifest that the ledger names"
    ]


# --- manifests ---


def test_an_edited_manifest_is_named_with_the_field(run: Path) -> None:
    edit_json(run / "manifests/00002.json", set_in("record", "weights_digest"))
    (found,) = findings(run)
    assert str(found).startswith(
        "error manifests/00002.json (step 2): differs from the manifest that the ledger names: "
        "manifest.record.weights_digest: "
    )
    assert str(found).endswith(" against 0000000000000000")


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (Path.unlink, "the file is missing"),
        (lambda path: path.write_text("{"), "not JSON: Expecting property name"),
        (lambda path: path.write_text('{"record": NaN}'), "not JSON: manifest.record is nan"),
        (lambda path: path.write_bytes(b"\xff"), "not JSON: 'utf-8' codec"),
    ],
    ids=["removed", "cut", "nan", "binary"],
)
def test_a_manifest_that_cannot_be_read_is_named(run: Path, damage: Callable[[Path], Any], problem: str) -> None:
    damage(run / "manifests/00001.json")
    (found,) = findings(run)
    assert str(found).startswith(f"error manifests/00001.json (step 1): {problem}")


def test_a_damaged_manifest_artifact_is_named_and_its_file_serves(run: Path) -> None:
    ref = LedgerView.read(run / LEDGER).steps()[2].manifest
    (run / ref.uri).write_text("{")
    (found,) = findings(run)
    assert str(found) == f"error {ref.uri} (manifest, step 2): truncated: 1 of {ref.size} bytes"


def test_a_manifest_of_another_schema_is_named(run: Path) -> None:
    forge(run, 3, set_in("schema_version", value=1))
    assert "manifests/00003.json (step 3): not a manifest that this version reads: schema_version" in str(
        findings(run)[0]
    )


FORGED = {
    "weights_digest": "record.weights_digest: 0000000000000000, by the ledger ",
    "code_version": "record.code_version: 0000000000000000, by the ledger ",
    "scales_digest": "record.scales_digest: 0000000000000000, but the stored scales are ",
    "predecessor": "its record names the predecessor 0000000000000000, which is ",
}


@pytest.mark.parametrize("field", FORGED)
def test_a_forged_record_is_named_and_breaks_the_chain(run: Path, field: str) -> None:
    forge(run, 2, set_in("record", field))
    found = [(finding.place, finding.problem) for finding in findings(run)]
    assert any(place == "manifests/00002.json" and problem.startswith(FORGED[field]) for place, problem in found)
    broken = [place for place, problem in found if "names the predecessor" in problem]
    assert broken[-1] == "manifests/00003.json", "what follows names the record that was"


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        (("inputs", "train", "policy", "digest"), "record.inputs.train.policy: 0000000000000000 ("),
        (("inputs", "record", "rollouts", "size"), "record.inputs.record.rollouts: "),
        (("outputs", "train", "next_policy", "digest"), "record.outputs.train.next_policy: 0000000000000000 ("),
        (("step",), "record.step: 9, by the ledger 3"),
    ],
    ids=lambda value: ".".join(value) if isinstance(value, tuple) else "",
)
def test_the_record_agrees_with_the_ledger(run: Path, path: tuple[str, ...], problem: str) -> None:
    forge(run, 3, set_in("record", *path, value=9 if path[-1] in ("size", "step") else OTHER))
    (found,) = findings(run)
    assert str(found).startswith(f"error manifests/00003.json (step 3): {problem}")


def test_an_input_that_the_pipeline_does_not_have_is_named(run: Path) -> None:
    forge(run, 3, set_in("record", "inputs", "train", "more", value={"digest": OTHER, "size": 1}))
    (found,) = findings(run)
    assert found.problem == "record.inputs.train.more: 0000000000000000 (1 bytes), but its producer stored absent"


def test_timings_and_paths_agree_with_the_ledger(run: Path) -> None:
    forge(run, 3, set_in("observed", "timings", "train", value=1000.0))
    forge(run, 2, set_in("observed", "paths", "rollouts", value="elsewhere"))
    assert [finding.problem.partition(", by the ledger")[0] for finding in findings(run)] == [
        "observed.paths.rollouts: elsewhere",
        "observed.timings.train: 1000.0",
    ]


# --- the ledger ---


@pytest.mark.parametrize(
    ("path", "value", "wanted", "problems"),
    [
        ("weights_digest", OTHER, {"event": "step", "step": 3}, ["record.weights_digest: "]),
        ("seconds", 9.0, {"task": "train", "step": 3}, ["observed.timings.train: "]),
        ("code_version", OTHER, {"event": "segment"}, ["the run was begun by code 0", "record.code_version: "]),
        ("outputs.next_policy.size", 5, {"task": "train", "step": 3}, ["record.outputs.train.next_policy: ", "has 97"]),
        ("manifest.digest", OTHER, {"event": "step", "step": 3}, ["differs from the manifest ", "content differs: "]),
        ("digest", OTHER, {"event": "checkpoint", "step": 3}, ["content differs: digest "]),
        ("weights_digest", OTHER, {"event": "checkpoint", "step": 3}, ["holds weights 0000000000000000, its step "]),
        ("uri", "../x", {"event": "checkpoint", "step": 3}, ["not where the checkpoint of this step belongs"]),
    ],
)
def test_an_edited_ledger_is_named(
    run: Path, path: str, value: object, wanted: dict[str, Any], problems: list[str]
) -> None:
    edit_ledger(run, set_in(*path.split("."), value=value), **wanted)
    found = [finding.problem for finding in findings(run)]
    for problem in problems:
        assert any(text.startswith(problem) for text in found), found


def test_an_artifact_exchanged_in_the_ledger_is_named(run: Path) -> None:
    other = ref_of(run, 2, "next_policy").model_dump()
    edit_ledger(run, set_in("outputs", "next_policy", value=other), task="train", step=3)
    found = [finding.problem for finding in findings(run)]
    assert any(text.startswith("record.outputs.train.next_policy: ") for text in found)
    assert any(text.startswith("the stored policy is {'version': 2, ") for text in found)


def order_problems(run: Path) -> list[str]:
    return [finding.problem for finding in findings(run) if finding.place.startswith(LEDGER)]


def test_a_missing_line_of_a_middle_step_is_named(run: Path) -> None:
    edit_ledger(run, drop, event="step", step=2)
    assert order_problems(run) == ["an entry of step 3, but step 2 is not committed"]
    assert ("checkpoints/00002", "its step is not committed") in [
        (found.place, found.problem) for found in findings(run)
    ]


def test_lines_that_go_back_are_named(run: Path) -> None:
    ledger = LedgerView.read(run / LEDGER)
    for entry in (ledger.steps()[3], ledger.tasks(0)["evaluate"]):
        with (run / LEDGER).open("a") as file:
            file.write(entry.model_dump_json() + "\n")
    assert order_problems(run) == [
        "an entry of step 3, which was committed before",
        "an entry of step 0, which was committed before",
    ]


def test_a_missing_task_line_is_named(run: Path) -> None:
    edit_ledger(run, drop, task="reward", step=2)
    problems = [finding.problem for finding in findings(run)]
    assert any(problem.startswith("record.outputs.reward.rewards: ") for problem in problems)
    assert any(problem.endswith("by the ledger absent") for problem in problems)


def test_a_malformed_line_is_named_and_the_rest_is_checked(run: Path) -> None:
    lines = (run / LEDGER).read_text().splitlines()
    number = next(i for i, line in enumerate(lines, start=1) if '"task":"prompts"' in line)
    lines[number - 1] = lines[number - 1].replace('"seconds":', '"minutes":')
    path_of(run, 3, "rollouts").unlink()
    (run / LEDGER).write_text("".join(f"{line}\n" for line in lines))
    found = [str(finding) for finding in findings(run)]
    assert found[0] == f"error ledger.jsonl:{number}: not an entry: task.seconds: Field required"
    assert found[-1].endswith("(rollouts, step 3, task rollout): the file is missing")


def test_a_missing_ledger_is_named(run: Path) -> None:
    (run / LEDGER).unlink()
    assert [str(finding) for finding in findings(run)] == [
        "error ledger.jsonl: cannot be read: No such file or directory"
    ]


# --- run.json ---


def test_an_edited_configuration_is_named_once_for_all_steps(run: Path) -> None:
    edit_json(run / "run.json", set_in("config", "training", "learning_rate", value=0.5))
    (found,) = findings(run)
    assert found.place == "run.json"
    assert "the records of steps 0-3 say" in found.problem


def test_settings_that_do_not_make_numbers_may_differ(run: Path) -> None:
    edit_json(run / "run.json", set_in("config", "steps", value=99))
    assert findings(run) == []


def test_a_configuration_that_cannot_be_read_is_named_and_digests_are_still_checked(run: Path) -> None:
    edit_json(run / "run.json", set_in("config", "new_setting", value=1))
    path_of(run, 3, "rollouts").unlink()
    configuration, missing = findings(run)
    assert str(configuration).startswith("error run.json: this version cannot read the configuration: new_setting: ")
    assert missing.problem == "the file is missing"


def test_an_edited_code_version_of_the_run_is_named(run: Path) -> None:
    edit_json(run / "run.json", set_in("code_version"))
    (found,) = findings(run)
    assert found.place == "ledger.jsonl:1"
    assert found.problem.endswith("run.json says 0000000000000000")


# --- checkpoints ---


@pytest.mark.parametrize("damage", ["flipped", "removed", "added"])
def test_a_damaged_checkpoint_is_named(run: Path, damage: str) -> None:
    file = max((run / "checkpoints/00002").rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    if damage == "flipped":
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    elif damage == "removed":
        file.unlink()
    else:
        (file.parent / "more").touch()
    (found,) = findings(run)
    assert str(found).startswith("error checkpoints/00002 (step 2): content differs: digest ")


def test_the_newest_checkpoint_must_be_there(run: Path) -> None:
    shutil.rmtree(run / "checkpoints/00002")
    assert findings(run) == []
    shutil.rmtree(run / "checkpoints/00003")
    (found,) = findings(run)
    assert str(found) == "error checkpoints/00003 (step 3): the folder is missing, and it is the newest checkpoint"
    entry = LedgerView.read(run / LEDGER).checkpoints()[-1]
    stone = Tombstone(
        digest=entry.digest, uri=entry.uri, kind="checkpoint", size=1, step=3, reason="moved away", when="then"
    )
    bury(run, [stone])
    assert findings(run) == []
    assert "note checkpoints/00003 (step 3): removed (moved away, then)" in map(str, findings(run, "note"))


# --- what was done again ---


def redo(run: Path, step: int) -> Ref:
    """Enter that redoing a step gave another policy; returns that policy."""
    policy = ArtifactStore(run).put_json("policy", {"version": step, "weights_digest": OTHER})
    entry = RedoEntry(step=step, task="train", outputs={"next_policy": policy}, code_version=OTHER)
    lines = (run / LEDGER).read_text().splitlines(keepends=True)
    last = next(i for i, line in enumerate(lines) if f'"event":"step","step":{step}' in line)
    (run / LEDGER).write_text("".join([*lines[: last + 1], entry.model_dump_json() + "\n", *lines[last + 1 :]]))
    return policy


def test_inputs_that_a_redo_gave_are_noted(run: Path) -> None:
    policy = redo(run, 2)
    content = {"digest": policy.digest, "size": policy.size}
    for task in ("rollout", "logprobs", "train"):
        forge(run, 3, set_in("record", "inputs", task, "policy", value=content))
    assert findings(run) == []
    assert [finding.problem for finding in findings(run, "note")][:2] == [
        "redone by code 0000000000000000 with another outcome, from which the run went on",
        "goes on from what was redone: record.inputs.logprobs.policy, record.inputs.rollout.policy, "
        "record.inputs.train.policy",
    ]


def test_a_checkpoint_of_what_a_redo_gave_is_accepted_and_its_policy_checked(run: Path) -> None:
    policy = redo(run, 3)
    edit_ledger(run, set_in("weights_digest"), event="checkpoint", step=3)
    assert findings(run) == []
    (run / policy.uri).unlink()
    assert [finding.place for finding in findings(run)] == [policy.uri, "checkpoints/00003"]


def test_steps_in_words() -> None:
    assert spans([]) == ""
    assert spans([3]) == "3"
    assert spans({5, 0, 1, 2, 9, 8}) == "0-2, 5, 8-9"
