import hashlib
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from manifest_chain import first_broken_link
from pydantic import JsonValue, TypeAdapter

from fp8core.config.precision import PrecisionContract
from fp8core.store.json_text import canonical_json
from fp8core.store.manifest import (
    Content,
    StepManifest,
    StepObservations,
    StepRecord,
    code_version,
    git_state,
    hardware,
    library_versions,
    record_digest,
)


def manifest(step: int = 0, predecessor: str | None = None, seconds: float = 1.0) -> StepManifest:
    return StepManifest(
        record=StepRecord(
            step=step,
            predecessor=predecessor,
            config_digest="c",
            code_version="v",
            steps=3,
            inputs={"train": {"rollouts": Content(digest="aa", size=2)}},
            outputs={"train": {"policy": Content(digest="bb", size=3)}},
            model_revision=None,
            seeds={"rollout": 7},
            scales_digest=None,
            precision=PrecisionContract().model_dump(mode="json"),
            executed={"rollout": {"engine": "embedded"}},
            level="exact",
            weights_digest="w",
            versions={"torch": "2"},
        ),
        observed=StepObservations(timings={"train": seconds}, hardware={"cores": 2}, paths={"policy": "artifacts/x"}),
    )


def chain(length: int) -> list[StepManifest]:
    manifests = [manifest(0)]
    for step in range(length - 1):
        manifests.append(manifest(step, record_digest(manifests[-1])))
    return manifests


def replace_in_record(original: StepManifest, **changes: object) -> StepManifest:
    return original.model_copy(update={"record": original.record.model_copy(update=changes)})


def test_the_digest_is_of_the_canonical_record() -> None:
    record = manifest().record.model_dump(mode="json")
    assert record_digest(manifest()) == hashlib.sha256(canonical_json(record, "record")).hexdigest()


def test_the_digest_survives_storage_and_ignores_what_was_observed() -> None:
    first = manifest(seconds=1.0)
    assert record_digest(StepManifest.model_validate_json(first.model_dump_json())) == record_digest(first)
    assert record_digest(manifest(seconds=2.0)) == record_digest(first)


def test_the_chain_holds_and_a_changed_or_missing_step_breaks_it() -> None:
    manifests = chain(5)
    assert first_broken_link(manifests) is None
    assert first_broken_link([]) is None
    changed = [*manifests[:2], replace_in_record(manifests[2], weights_digest="forged"), *manifests[3:]]
    assert first_broken_link(changed) == 2
    assert first_broken_link(manifests[:2] + manifests[3:]) == 2
    assert first_broken_link(manifests[1:]) == 0


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@example.org", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout" / "core"
    (folder / "part").mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "part" / "a.py").write_text("one = 1\n")
    return folder


def test_code_version_covers_names_and_contents_of_sources_alone(package: Path, tmp_path: Path) -> None:
    version = code_version(package)
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "a.cpython-311.pyc").touch()
    (package / "notes.txt").touch()
    assert code_version(package) == version
    copy = shutil.copytree(package, tmp_path / "installed" / "core")
    assert code_version(copy) == version
    (package / "part" / "a.py").write_text("one = 2\n")
    changed = code_version(package)
    (package / "part" / "a.py").rename(package / "part" / "b.py")
    assert len({version, changed, code_version(package)}) == 3


def test_versions_and_hardware_are_of_this_machine() -> None:
    versions = library_versions()
    assert versions["python"] == platform.python_version()
    assert versions["torch"] == torch.__version__
    assert {"numpy", "pyarrow"} <= set(versions)
    found = hardware()
    TypeAdapter(dict[str, JsonValue]).validate_python(found)
    assert found["machine"] == platform.machine()


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_git_state_of_a_checkout(package: Path) -> None:
    checkout = package.parent
    assert git_state(package) == {}
    git(checkout, "init")
    assert git_state(package) == {}
    git(checkout, "add", ".")
    assert git_state(package) == {}, "no commit yet"
    git(checkout, "commit", "-m", "first")
    assert git_state(package) == {"commit": git(checkout, "rev-parse", "HEAD"), "dirty": False}
    (package / "__init__.py").write_text("changed = True\n")
    assert git_state(package)["dirty"] is True
