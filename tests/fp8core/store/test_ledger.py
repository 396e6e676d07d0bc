import errno
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from pydantic import ValidationError

from fp8core.errors import UserError
from fp8core.store.artifacts import Ref
from fp8core.store.ledger import CheckpointEntry, Ledger, LedgerView, SegmentEntry, StepEntry, TaskEntry

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


def test_the_last_entry_of_a_task_or_step_wins(path: Path) -> None:
    ledger = Ledger.open(path)
    for entry in (task(3, "train", "old"), step(3, "old"), task(3, "train", "new"), step(3, "new")):
        ledger.append(entry)
    assert LedgerView.read(path).tasks(3)["train"].key == "new"
    assert LedgerView.read(path).steps()[3].weights_digest == "new"


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


def test_zeros_that_a_power_cut_leaves_are_a_torn_line(path: Path) -> None:
    ledger = Ledger.open(path)
    ledger.append(step(0))
    whole = path.read_bytes()
    for tail in (b"\0" * 40, b'{"event":"st' + b"\0" * 40 + b"\n"):
        path.write_bytes(whole + tail)
        assert Ledger.open(path).last_step() == 0
        assert path.read_bytes() == whole


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda line: line[:20], "not a ledger entry: Invalid JSON"),
        (lambda line: b"", "not a ledger entry: Invalid JSON"),
        (lambda line: line.replace(b'"step"', b'"stop"', 1), "not a ledger entry: Input tag 'stop'"),
        (lambda line: line.replace(b'"step":1,', b'"step":-2,'), r"not a ledger entry\.step\.step: Input should be"),
        (lambda line: line.replace(b'"size":3', b'"size":3,"more":1'), r"entry\.step\.manifest\.more: Extra inputs"),
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


def test_an_append_that_fails_half_way_leaves_the_ledger_readable(
    path: Path, file_size_limit: Callable[[int], AbstractContextManager[None]]
) -> None:
    ledger = Ledger.open(path)
    ledger.append(step(0))
    whole = path.stat().st_size
    with file_size_limit(whole + 30), pytest.raises(UserError, match=rf"^cannot append to the ledger {path}: \D+$"):
        ledger.append(step(1))
    assert path.stat().st_size == whole
    assert ledger.last_step() == 0
    ledger.append(step(1))
    assert Ledger.open(path).last_step() == 1


def test_an_append_is_synced_before_it_returns(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger.open(path)
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(path.read_bytes()), fsync(descriptor)))
    ledger.append(step(0))
    assert synced == [path.read_bytes()]


def test_a_failing_append_of_one_thread_takes_nothing_from_the_others(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger.open(path)

    def slow_and_sometimes_failing(descriptor: int) -> None:
        time.sleep(0.001)
        if b"bad" in path.read_bytes().splitlines()[-1]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def append(name: str) -> bool:
        try:
            ledger.append(task(0, name))
        except UserError:
            return False
        return True

    monkeypatch.setattr(os, "fsync", slow_and_sometimes_failing)
    names = [f"{'bad' if i % 3 == 0 else 'good'}{i}" for i in range(60)]
    with ThreadPoolExecutor(4) as pool:
        appended = {name for name, done in zip(names, pool.map(append, names), strict=True) if done}
    assert appended == {name for name in names if name.startswith("good")}
    assert set(ledger.tasks(0)) == set(LedgerView.read(path).tasks(0)) == appended


def test_a_ledger_that_cannot_be_opened_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"^cannot read the ledger {tmp_path}: Is a directory$"):
        Ledger.open(tmp_path)
    with pytest.raises(UserError, match=rf"^cannot read the ledger {tmp_path}/none: No such file or directory$"):
        LedgerView.read(tmp_path / "none")


def test_entries_are_frozen_and_finite() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        step(0).step = 1
    with pytest.raises(ValidationError, match="finite"):
        TaskEntry(step=0, task="t", key="k", outputs={}, started=float("nan"), finished=1.0)
