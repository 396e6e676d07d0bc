from collections.abc import Callable
from pathlib import Path

import pytest

from fp8core.errors import UserError
from fp8core.store.artifacts import Ref
from fp8core.store.ledger import CheckpointEntry, Ledger, LedgerView, RedoEntry, SegmentEntry, StepEntry, TaskEntry

REF = Ref(kind="metrics", digest="ab" * 32, uri=f"artifacts/ab/{'ab' * 32}.json", size=3)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "ledger.jsonl"


def task(step: int, name: str, key: str = "k") -> TaskEntry:
    return TaskEntry(step=step, task=name, key=key, outputs={"out": REF}, started=1.0, seconds=1.0)


def step(number: int, weights: str = "w") -> StepEntry:
    return StepEntry(step=number, manifest=REF, weights_digest=weights, committed_ms=5)


def test_entries_come_back_in_each_question(path: Path) -> None:
    checkpoint = CheckpointEntry(step=0, uri="checkpoints/00000", digest="d", weights_digest="w")
    segments = [SegmentEntry(pid=pid, host="h", code_version="c", started=3.5) for pid in (1, 2)]
    ledger = Ledger.open(path)
    assert ledger.last_step() is None
    for entry in (segments[0], task(0, "warm_start"), step(0), task(1, "prompts"), task(1, "rollout"), step(1)):
        ledger.append(entry)
    ledger.append(checkpoint)
    ledger.append(segments[1])
    ledger.append(task(1, "prompts"))
    ledger.close()
    for again in (ledger, Ledger.open(path), LedgerView.read(path)):
        assert list(again.tasks(1)) == ["prompts", "rollout"]
        assert again.tasks(1)["rollout"] == task(1, "rollout")
        assert again.tasks(2) == {}
        assert again.steps() == {0: step(0), 1: step(1)}
        assert again.last_step() == 1
        assert again.checkpoints() == [checkpoint]
        assert again.segments() == segments


def test_a_last_line_torn_at_any_byte_is_cut_off(path: Path) -> None:
    ledger = Ledger.open(path)
    ledger.append(step(0))
    whole = path.stat().st_size
    ledger.append(task(1, "rollout"))
    content = path.read_bytes()
    for length in [whole, *range(whole + 1, len(content) - 1, 17), len(content) - 1]:
        path.write_bytes(content[:length])
        assert LedgerView.read(path).steps() == {0: step(0)}
        assert path.stat().st_size == length, "a view changes nothing"
        resumed = Ledger.open(path)
        assert resumed.tasks(1) == {}
        assert path.read_bytes() == content[:whole]
    resumed.append(task(1, "reward"))
    assert list(LedgerView.read(path).tasks(1)) == ["reward"]


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda line: line[:20], "not a ledger entry: Invalid JSON"),
        (lambda line: line.replace(b'"step":1,', b'"step":-2,'), r"not a ledger entry: step\.step: Input should be"),
    ],
)
@pytest.mark.parametrize("number", [1, 3])
def test_any_other_malformed_line_is_refused_with_its_number(
    path: Path, damage: Callable[[bytes], bytes], what: str, number: int
) -> None:
    ledger = Ledger.open(path)
    for _ in range(3):
        ledger.append(step(1))
    lines = path.read_bytes().split(b"\n")
    lines[number - 1] = damage(lines[number - 1])
    path.write_bytes(b"\n".join(lines))
    for read in (Ledger.open, LedgerView.read):
        with pytest.raises(UserError, match=rf"^{path}:{number}: .*{what}") as caught:
            read(path)
        assert "\n" not in str(caught.value)
    assert path.read_bytes() == b"\n".join(lines), "a refused ledger is left as it is"


def redo(number: int, name: str, key: str) -> RedoEntry:
    ref = REF.model_copy(update={"kind": key})
    return RedoEntry(step=number, task=name, outputs={"out": ref}, code_version="c")


@pytest.mark.parametrize(("started", "cut"), [(0.5, False), (1.5, True), (5.5, False)])
def test_a_step_was_cut_if_a_process_began_within_it(path: Path, started: float, cut: bool) -> None:
    ledger = Ledger.open(path)
    ledger.append(task(1, "prompts"))
    ledger.append(SegmentEntry(pid=2, host="h", code_version="c", started=started))
    ledger.append(task(1, "train"), step(1).model_copy(update={"committed_ms": 5000}))
    assert ledger.was_cut(1) is LedgerView.read(path).was_cut(1) is cut


def test_a_task_that_ran_anew_after_a_redo_is_not_redone(path: Path) -> None:
    ledger = Ledger.open(path)
    ledger.append(task(1, "train"))
    ledger.append(redo(1, "train", "policy"))
    assert list(ledger.redone(1)) == ["train"]
    ledger.append(task(1, "train", "new"))
    assert ledger.redone(1) == LedgerView.read(path).redone(1) == {}
