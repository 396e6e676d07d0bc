from pathlib import Path

from step_records import step_manifest, step_record

from fp8core.store.ledger import LedgerView, SegmentEntry, TaskEntry
from fp8core.store.manifest import StepManifest
from fp8core.store.run_directory import RunDescription
from fp8core.store.run_view import Provenance, RunView

FIRST = SegmentEntry(pid=1, host="a", code_version="1" * 64, started=0.0)
SECOND = SegmentEntry(pid=2, host="b", code_version="2" * 64, started=3600.0)


def manifest(step: int, code: str, git: dict[str, object]) -> StepManifest:
    return step_manifest(step_record(step, code_version=code * 64), hardware={"memory": 3 << 30}, git=git)


def view() -> RunView:
    task = TaskEntry(step=0, task="warm_start", key="k", outputs={}, started=0.0, seconds=0.0)
    ledger = LedgerView(Path("run/ledger.jsonl"), [FIRST, SECOND, task])
    description = RunDescription.model_construct(id="i", config={}, code_version="1" * 64, created="then")
    return RunView(Path("run"), description, None, ledger, [])


def gathered() -> Provenance:
    provenance = Provenance()
    for step, code in enumerate("112"):
        provenance.add(manifest(step, code, {"commit": "abc", "dirty": code == "2"}))
    return provenance


def test_what_changed_names_its_steps() -> None:
    text = gathered().text(view())
    for words in ("111111111111 (steps 0-1)", "222222222222 (steps 2)", "abc, with uncommitted changes (steps 2)"):
        assert words in text
    assert "process 2 on b" in text
