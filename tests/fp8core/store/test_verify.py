"""Damage of each kind to a copy of a real run, and each is named."""

import json
import math
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from fp8core.config.load import config_digest, load_config, reload_config
from fp8core.durable import folder_digest
from fp8core.errors import StoredFileError, UserError
from fp8core.numerics.fingerprint import policy_digest
from fp8core.run.verify import references, verified_bytes, verify
from fp8core.store.artifacts import ArtifactStore, Ref
from fp8core.store.deletion_log import Deletion, log_deletions
from fp8core.store.heads import Chain, ExpectedHead
from fp8core.store.json_text import canonical_json
from fp8core.store.kinds import refuse_wrong_kinds
from fp8core.store.layout import LEDGER
from fp8core.store.ledger import LedgerView, RedoEntry, SegmentEntry
from fp8core.store.manifest import Head, StepManifest
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


def in_record(**values: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        content["record"] |= values

    return change


# --- an intact run ---


def test_an_intact_run_has_no_errors_and_its_pruned_checkpoint_is_noted(run: Path) -> None:
    view, read, seen = RunView.read(run), list[int](), list[StepManifest]()
    found = list(verify(view, read.append, seen.append))
    assert [str(finding) for finding in found] == ["note checkpoints: pruned, as later ones replace them: steps 1"]
    assert sum(read) == verified_bytes(view)
    assert [manifest.record.step for manifest in seen] == [0, 1, 2, 3]
    files = {path for path in (run / "artifacts").rglob("*") if path.is_file()}
    assert {run / reference.ref.uri for reference in references(view)} == files


def keep_lines(run: Path, step: int, task: str | None = None) -> None:
    """Cut the ledger after the end of a step, or after one of its tasks."""
    wanted = f'"step":{step},"task":"{task}"' if task is not None else f'"event":"step","step":{step},'
    lines = (run / LEDGER).read_text().splitlines(keepends=True)
    last = next((i for i, line in enumerate(lines) if wanted in line), -1)
    (run / LEDGER).write_text("".join(lines[: last + 1]))


@pytest.mark.parametrize(
    ("step", "task", "later"),
    [(-1, None, "0-3"), (0, None, "1-3"), (2, None, "3"), (3, "train", "3"), (1, "record", "2-3")],
)
def test_a_ledger_that_was_cut_is_an_error_by_the_files_of_later_steps(
    run: Path, step: int, task: str | None, later: str
) -> None:
    head = Head.of(StepManifest.model_validate_json((run / "manifests/00003.json").read_bytes()))
    keep_lines(run, step, task)
    shutil.rmtree(run / "checkpoints")
    links = Chain()
    found = [finding for finding in verify(RunView.read(run), watch=links.add) if finding.severity == "error"]
    (cut,) = (finding for finding in found if "its end was cut off" in finding.problem)
    assert (cut.place, cut.step) == (LEDGER, None)
    assert f"files of steps {later} (manifests/" in cut.problem
    assert isinstance(ExpectedHead.parse(str(head)).compare(links), Finding)


def test_a_checkpoint_alone_shows_that_the_ledger_was_cut(run: Path) -> None:
    edit_ledger(run, drop, step=3)
    (run / "manifests/00003.json").unlink()
    assert [finding.place for finding in findings(run)] == [LEDGER]
    shutil.rmtree(run / "checkpoints/00003")
    assert findings(run) == []


@pytest.mark.parametrize("step", [0, 3])
def test_a_kill_between_a_manifest_and_its_line_is_no_error(run: Path, step: int) -> None:
    lines = (run / LEDGER).read_text().splitlines(keepends=True)
    end = next(i for i, line in enumerate(lines) if f'"event":"step","step":{step},' in line)
    (run / LEDGER).write_text("".join(lines[:end]))
    for later in range(step, 4):
        shutil.rmtree(run / f"checkpoints/{later:05d}", ignore_errors=True)
        (run / f"manifests/{later + 1:05d}.json").unlink(missing_ok=True)
    (run / f"manifests/{step:05d}.signature.json").write_text("{}")
    assert findings(run) == []


def test_a_pipe_in_place_of_a_manifest_is_not_waited_for(run: Path) -> None:
    os.mkfifo(run / "manifests/00004.json")
    assert [finding.place for finding in findings(run)] == [LEDGER]


def test_a_kill_before_the_first_task_of_other_code_is_no_error(run: Path) -> None:
    """run.json has the code of a process that has not said that it began."""
    keep_lines(run, -1)
    for folder in ("manifests", "checkpoints"):
        shutil.rmtree(run / folder)
    first = SegmentEntry(pid=1, host="h", code_version="c" * 64, started=1.0)
    (run / LEDGER).write_text(first.model_dump_json() + "\n")
    assert [finding for finding in findings(run) if "was begun by code" in finding.problem] == []


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no run \(no run\.json\)$"):
        RunView.read(tmp_path)


# --- artifacts ---


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)


def put_a_folder_in_place(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-7]), "truncated: "),
        (flip_a_bit, "content differs: SHA-256 "),
        (Path.unlink, "the file is missing"),
        (put_a_folder_in_place, "cannot be read: it is a folder"),
    ],
    ids=["truncated", "flipped", "missing", "unreadable"],
)
def test_a_damaged_artifact_is_named_with_kind_step_and_task(
    run: Path, damage: Callable[[Path], Any], problem: str
) -> None:
    path = path_of(run, 2, "rollouts")
    damage(path)
    (found,) = findings(run)
    assert str(found).startswith(f"error {path.relative_to(run)} (rollouts, step 2, task rollout): {problem}")


@pytest.mark.parametrize(
    ("step", "task", "artifact", "kind"),
    [(2, "train", "next_policy", "notes"), (2, "rollout", "rollouts", "metrics"), (0, "warm_start", "weights", "w")],
)
def test_a_reference_of_another_kind_is_named_by_verify_and_before_gc(
    run: Path, step: int, task: str, artifact: str, kind: str
) -> None:
    refuse = partial(refuse_wrong_kinds, pipeline=load_config("tiny").pipeline)
    refuse(LedgerView.read(run / LEDGER))
    edit_ledger(run, set_in("outputs", artifact, "kind", value=kind), event="task", step=step, task=task)
    named = [finding for finding in findings(run) if "by the pipeline it is" in finding.problem]
    assert [(found.step, found.task, found.kind) for found in named] == [(step, task, kind)]
    with pytest.raises(StoredFileError, match=f"step {step}, task {task}: artifact {artifact} is of kind {kind}, "):
        refuse(LedgerView.read(run / LEDGER))


def test_the_kind_of_what_only_own_steps_read_is_that_of_its_first_entry(run: Path) -> None:
    def another(entry: dict[str, Any]) -> None:
        entry["outputs"]["notes"] = {**entry["outputs"]["prompts"], "kind": "notes" if entry["step"] < 3 else "metrics"}

    edit_ledger(run, another, event="task", task="prompts")
    assert "artifact notes is of kind metrics, by the pipeline it is notes" in [f.problem for f in findings(run)]


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


def test_what_retention_removed_is_a_note_with_reason_and_date(run: Path) -> None:
    refs = [ref_of(run, 1, "prompts"), ref_of(run, 1, "rollouts")]
    when = "2026-01-02T03:04:05+00:00"
    log_deletions(run, [Deletion(**ref.model_dump(), step=1, reason="step 1 is not kept", when=when) for ref in refs])
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
    log_deletions(run, [Deletion(**ref.model_dump(), step=1, reason="r", when="w")])
    assert findings(run) == []
    edit_json(run / "manifests/00001.json", set_in("record", "weights_digest"))
    assert [str(finding) for finding in findings(run)] == [
        "error manifests/00001.json (step 1): differs from the manifest that the ledger names"
    ]


# --- manifests ---


@pytest.mark.parametrize("content", ["[]", '"' + 9000 * "x" + '"'])
def test_a_second_copy_that_is_no_manifest_is_told_in_a_short_line(run: Path, content: str) -> None:
    (run / "manifests/00002.json").write_text(content)
    (found,) = findings(run)
    assert "differs from the manifest that the ledger names: manifest: {" in found.problem
    assert len(found.problem) < 250


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
    [(Path.unlink, "the file is missing"), (lambda path: path.write_text("{"), "the manifest: not JSON: EOF while")],
    ids=["removed", "cut"],
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
        (("outputs", "train", "next_policy", "digest"), "record.outputs.train.next_policy: 0000000000000000 ("),
        (("step",), "record.step: 9, by the ledger 3"),
    ],
    ids=lambda value: ".".join(value) if isinstance(value, tuple) else "",
)
def test_the_record_agrees_with_the_ledger(run: Path, path: tuple[str, ...], problem: str) -> None:
    forge(run, 3, set_in("record", *path, value=9 if path[-1] in ("size", "step") else ZEROS))
    (found,) = findings(run)
    assert str(found).startswith(f"error manifests/00003.json (step 3): {problem}")


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
        ("weights_digest", ZEROS, {"event": "step", "step": 3}, ["record.weights_digest: "]),
        ("seconds", 9.0, {"task": "train", "step": 3}, ["observed.timings.train: "]),
        ("code_version", ZEROS, {"event": "segment"}, ["the run was begun by code 0", "record.code_version: "]),
        ("outputs.next_policy.size", 5, {"task": "train", "step": 3}, ["record.outputs.train.next_policy: ", "has 97"]),
        ("manifest.digest", ZEROS, {"event": "step", "step": 3}, ["not an entry: step.manifest: Value error, uri: "]),
        ("digest", ZEROS, {"event": "checkpoint", "step": 3}, ["content differs: digest "]),
        ("weights_digest", ZEROS, {"event": "checkpoint", "step": 3}, ["holds weights 0000000000000000, its step "]),
        ("uri", "../x", {"event": "checkpoint", "step": 3}, ["not an entry: checkpoint.uri: "]),
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


def test_a_malformed_line_is_named_and_the_rest_is_checked(run: Path) -> None:
    lines = (run / LEDGER).read_text().splitlines()
    number = next(i for i, line in enumerate(lines, start=1) if '"task":"prompts"' in line)
    lines[number - 1] = lines[number - 1].replace('"seconds":', '"minutes":')
    path_of(run, 3, "rollouts").unlink()
    (run / LEDGER).write_text("".join(f"{line}\n" for line in lines))
    found = [str(finding) for finding in findings(run)]
    assert found[0] == f"error ledger.jsonl:{number}: not an entry: task.seconds: Field required (and 1 more)"
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


def test_a_run_on_gpus_that_went_on_at_another_level_has_the_configuration_of_each_step(run: Path) -> None:
    edit_json(run / "run.json", set_in("config", "training", "device", value="cuda"))
    settings = json.loads((run / "run.json").read_bytes())["config"]
    for step, level in enumerate(("exact", "exact", "tolerant", "tolerant")):
        digest = config_digest(reload_config(settings, {"replay.level": level}))
        forge(run, step, in_record(level=level, config_digest=digest))
    assert [found for found in findings(run) if found.place == "run.json"] == []


def test_a_configuration_that_cannot_be_read_is_named_and_digests_are_still_checked(run: Path) -> None:
    edit_json(run / "run.json", set_in("config", "new_setting", value=1))
    path_of(run, 3, "rollouts").unlink()
    configuration, missing = findings(run)
    assert str(configuration).startswith(
        "error run.json: this version cannot read the configuration: run.json: config: new_setting: "
    )
    assert missing.problem == "the file is missing"


def test_an_edited_code_version_of_the_run_is_named(run: Path) -> None:
    edit_json(run / "run.json", set_in("code_version"))
    (found,) = findings(run)
    assert found.place == "ledger.jsonl:1"
    assert found.problem.endswith("run.json says 0000000000000000")


# --- checkpoints ---


@pytest.mark.parametrize("damage", ["flipped", "removed"])
def test_a_damaged_checkpoint_is_named(run: Path, damage: str) -> None:
    file = max((run / "checkpoints/00002").rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    if damage == "flipped":
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    else:
        file.unlink()
    (found,) = findings(run)
    assert str(found).startswith("error checkpoints/00002 (step 2): content differs: digest ")


def test_the_newest_checkpoint_must_be_there(run: Path) -> None:
    shutil.rmtree(run / "checkpoints/00002")
    assert findings(run) == []
    shutil.rmtree(run / "checkpoints/00003")
    (found,) = findings(run)
    assert str(found) == "error checkpoints/00003 (step 3): the folder is missing, and it is the newest checkpoint"
    entry = LedgerView.read(run / LEDGER).checkpoints()[-1]
    deletion = Deletion(
        digest=entry.digest, uri=entry.uri, kind="checkpoint", size=1, step=3, reason="moved away", when="then"
    )
    log_deletions(run, [deletion])
    assert findings(run) == []
    assert "note checkpoints/00003 (step 3): removed (moved away, then)" in map(str, findings(run, "note"))


def seal(run: Path, step: int, **fields: str) -> None:
    """Enter the digest of a checkpoint's folder as it is now, as a forger would, and other fields."""
    digest = folder_digest(run / f"checkpoints/{step:05d}")
    edit_ledger(run, lambda entry: entry.update(digest=digest, **fields), event="checkpoint", step=step)


def scale(file: Path, factor: float) -> dict[str, Tensor]:
    scaled = {name: factor * tensor for name, tensor in load_file(file).items()}
    save_file(scaled, file, metadata={"format": "pt"})
    return scaled


def change_moments(checkpoint: Path, change: Callable[[Tensor], Tensor]) -> None:
    file = checkpoint / "optimiser.safetensors"
    changed = {name: change(tensor).contiguous() for name, tensor in load_file(file).items()}
    save_file(changed, file, metadata={"format": "pt"})


def scale_all(checkpoint: Path) -> None:
    scale(checkpoint / "policy/model.safetensors", 2.0)
    digest = policy_digest(scale(checkpoint / "masters.safetensors", 2.0))
    edit_json(checkpoint / "trainer.json", lambda state: state.update(digest=digest))


def claim_shards(checkpoint: Path) -> None:
    (checkpoint / "masters.safetensors").unlink()
    (checkpoint / "megatron").mkdir()
    (checkpoint / "megatron/shard").write_bytes(b"")
    edit_json(checkpoint / "trainer.json", lambda state: state.update(grid={}))


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda at: scale(at / "policy/model.safetensors", 0.0), "policy/model.safetensors: tensor "),
        (lambda at: (at / "masters.safetensors").unlink(), "masters.safetensors: cannot be read"),
        (lambda at: (at / "masters.safetensors").write_bytes(b"garbled" * 9), "masters.safetensors: not a complete"),
        (lambda at: scale(at / "masters.safetensors", 2.0), "masters.safetensors: its weights have the digest "),
        (scale_all, "trainer.json: digest: "),
        (claim_shards, "trainer.json: grid: "),
        (lambda at: scale(at / "optimiser.safetensors", math.nan), "optimiser.safetensors: tensor "),
        (lambda at: (at / "optimiser.safetensors").write_bytes(b""), "optimiser.safetensors: not a complete"),
        (
            lambda at: change_moments(at, lambda each: each[:1] if each.dim() else each),
            "optimiser.safetensors: tensor ",
        ),
        (lambda at: change_moments(at, lambda each: each.half()), "optimiser.safetensors: tensor "),
        (lambda at: edit_json(at / "trainer.json", lambda state: state.update(version=2)), "trainer.json: version: 2"),
    ],
)
def test_exchanged_weights_are_found_though_the_ledger_has_the_digest_of_their_folder(
    run: Path, damage: Callable[[Path], Any], problem: str
) -> None:
    damage(run / "checkpoints/00003")
    seal(run, 3)
    (found,) = findings(run)
    assert str(found).startswith(f"error checkpoints/00003 (step 3): {problem}")


def test_weights_that_the_whole_checkpoint_and_its_line_agree_on_are_not_those_of_the_chain(run: Path) -> None:
    scale_all(run / "checkpoints/00003")
    seal(run, 3, weights_digest=json.loads((run / "checkpoints/00003/trainer.json").read_text())["digest"])
    (found,) = findings(run)
    assert str(found).startswith("error checkpoints/00003 (step 3): holds weights ")


# --- what was done again ---


def redo(run: Path, step: int, weights_digest: str = ZEROS) -> Ref:
    """Enter that redoing a step gave another policy; returns that policy."""
    policy = ArtifactStore(run).put_json("policy", {"version": step, "weights_digest": weights_digest})
    entry = RedoEntry(step=step, task="train", outputs={"next_policy": policy}, code_version=ZEROS)
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
    scale_all(run / "checkpoints/00003")
    made = json.loads((run / "checkpoints/00003/trainer.json").read_text())["digest"]
    policy = redo(run, 3, made)
    seal(run, 3, weights_digest=made)
    assert findings(run) == []
    (run / policy.uri).unlink()
    assert [finding.place for finding in findings(run)] == [policy.uri, "checkpoints/00003"]
