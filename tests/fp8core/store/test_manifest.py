import shutil
from pathlib import Path

import pytest
from step_records import step_manifest, step_record

from fp8core.store.manifest import Content, StepManifest, code_version, record_digest


def manifest(seconds: float) -> StepManifest:
    record = step_record(inputs={"train": {"rollouts": Content(digest="aa", size=2)}}, seeds={"rollout": 7})
    return step_manifest(record, timings={"train": seconds}, hardware={"cores": 2})


def test_the_digest_survives_storage_and_ignores_what_was_observed() -> None:
    first = manifest(1.0)
    assert record_digest(StepManifest.model_validate_json(first.model_dump_json())) == record_digest(first)
    assert record_digest(manifest(2.0)) == record_digest(first)


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
