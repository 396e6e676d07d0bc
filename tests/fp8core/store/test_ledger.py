import errno
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from fp8core.errors import StoredFileError, UserError
from fp8core.store.artifacts import Ref
from fp8core.store.ledger import (
    BoundEntry,
    CheckpointEntry,
    Entry,
    Ledger,
    LedgerView,
    RedoEntry,
    SegmentEntry,
    StepEntry,
    TaskEntry,
)

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
        (lambda line: line.replace(b'"step":1,', b'"step":-2,'), r"not a ledger entry: step\.step: Input should be"),
        (lambda line: line.replace(b'"size":3', b'"size":3,"more":1'), r"entry: step\.manifest\.more: Extra inputs"),
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
    with file_size_limit(whole + len(step(1).model_dump_json()) + 30), pytest.raises(UserError):
        ledger.append(step(1), step(2))
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


def test_the_name_and_the_cut_are_durable_before_a_ledger_is_open(
    path: Path, stored: list[tuple[str, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    Ledger.open(path).append(step(0))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"event"')
    stored.clear()
    fsync, synced = os.fsync, []
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(path.read_bytes()), fsync(descriptor)))
    Ledger.open(path)
    assert stored == [("sync", path.parent), ("sync", path)]
    assert synced[-1] == whole


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
    with pytest.raises(UserError, match=rf"^cannot read the ledger {tmp_path}: it is a folder"):
        Ledger.open(tmp_path)
    with pytest.raises(UserError, match=rf"^cannot read the ledger {tmp_path}/none: No such file or directory$"):
        LedgerView.read(tmp_path / "none")


def test_the_last_step_of_a_range_can_be_the_gap(path: Path) -> None:
    ledger = Ledger.open(path)
    ledger.append(step(0), step(1))
    ledger.refuse_gap(0, 1)
    with pytest.raises(StoredFileError, match="step 2 is not"):
        ledger.refuse_gap(0, 2)


def test_a_checkpoint_lies_in_the_folder_of_its_step() -> None:
    with pytest.raises(ValidationError, match="is not that of the step"):
        CheckpointEntry(step=1, uri="checkpoints/00002", digest="d", weights_digest="w")


def test_entries_are_frozen_and_finite() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        step(0).step = 1
    with pytest.raises(ValidationError, match="finite"):
        TaskEntry(step=0, task="t", key="k", outputs={}, started=float("nan"), finished=1.0)


# --- read from both ends ---


def moved(entry: Entry, number: int) -> Entry:
    """The entry of another step."""
    if isinstance(entry, CheckpointEntry):
        return checkpoint(number)
    return entry.model_copy(update={"step": number})


def checkpoint(number: int) -> CheckpointEntry:
    return CheckpointEntry(step=number, uri=f"checkpoints/{number:05d}", digest="d", weights_digest="w")


def segment(pid: int) -> SegmentEntry:
    return SegmentEntry(pid=pid, host="h", code_version=f"c{pid}", started=3.5)


def redo(number: int, name: str, key: str) -> RedoEntry:
    ref = REF.model_copy(update={"kind": key})
    return RedoEntry(step=number, task=name, outputs={"out": ref}, code_version="c")


def crossing(number: int) -> BoundEntry:
    return BoundEntry(step=number, bound="b", action="warn", reason="r")


@st.composite
def histories(draw: st.DrawFn, longest: int) -> list[Entry]:
    """Ledgers as runs and redos can leave them: steps that never go back, anything else in between."""
    entries: list[Entry] = []
    reached = 0
    for i in range(draw(st.integers(0, longest))):
        reached += draw(st.sampled_from([0, 0, 1, 1, 3]))
        names = st.sampled_from(["train", "sync"])
        past = st.integers(0, reached)
        match draw(st.sampled_from(["task", "task", "step", "step", "checkpoint", "segment", "redo"])):
            case "task":
                entries.append(task(reached, draw(names), key=str(i)))
            case "step":
                entries.append(step(reached, weights=str(i)))
            case "checkpoint":
                entries.append(checkpoint(draw(past)))
            case "segment":
                entries.append(segment(i))
            case "redo" if any(isinstance(entry, TaskEntry | StepEntry) for entry in entries):
                reached = max(entry.step for entry in entries if isinstance(entry, TaskEntry | StepEntry))
                entries.append(
                    redo(draw(st.integers(0, reached)), draw(names), draw(st.sampled_from(["policy", str(i)])))
                )
    return entries


QUESTIONS: dict[str, Callable[[LedgerView, int], object]] = {
    "tasks": LedgerView.tasks,
    "artifacts": LedgerView.artifacts,
    "redone": LedgerView.redone,
    "effective_outputs": LedgerView.effective_outputs,
    "step": LedgerView.step,
    "begun": lambda view, _: view.begun(),
    "inexact_steps": lambda view, _: view.inexact_steps(),
    "steps": lambda view, _: view.steps(),
    "last_step": lambda view, _: view.last_step(),
    "checkpoints": lambda view, _: view.checkpoints(),
    "newest_checkpoints": lambda view, count: list(islice(view.newest_checkpoints(), count)),
    "segments": lambda view, _: view.segments(),
    "last_segment": lambda view, _: view.last_segment(),
}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    histories(40),
    histories(6),
    st.lists(st.tuples(st.sampled_from(sorted(QUESTIONS)), st.integers(0, 90)), min_size=1, max_size=8),
)
def test_read_from_both_ends_a_ledger_answers_as_one_read_whole(
    tmp_path: Path, before: list[Entry], after: list[Entry], questions: list[tuple[str, int]]
) -> None:
    """Whatever is asked first, and whatever is appended after opening."""
    path = tmp_path / "ledger.jsonl"
    path.unlink(missing_ok=True)
    reached = max((entry.step for entry in before if isinstance(entry, TaskEntry | StepEntry)), default=0)
    later = [entry if isinstance(entry, SegmentEntry) else moved(entry, entry.step + reached) for entry in after]
    path.write_text("".join(entry.model_dump_json() + "\n" for entry in before))
    with closing(Ledger.open(path)) as ledger:
        glanced, whole = LedgerView.glance(path), LedgerView.read(path)
        for name, step in questions:
            assert QUESTIONS[name](glanced, step) == QUESTIONS[name](whole, step), name
        for entry in later:
            ledger.append(entry)
        now = LedgerView.read(path)
        for name, step in questions:
            assert QUESTIONS[name](ledger, step) == QUESTIONS[name](now, step), name


@pytest.fixture
def long_run(path: Path) -> Path:
    """Two processes; the second made steps 11 to 45, with checkpoints after 20 and 40."""
    entries: list[Entry] = [segment(1)]
    for number in range(46):
        entries += [segment(2)] if number == 11 else []
        entries += [task(number, "prompts"), task(number, "train"), step(number)]
        entries += [segment(2), checkpoint(number)] if number in (20, 40) else []
    path.parent.mkdir()
    path.write_text("".join(entry.model_dump_json() + "\n" for entry in [*entries, task(46, "prompts")]))
    return path


def damage(path: Path, number: int) -> None:
    lines = path.read_bytes().split(b"\n")
    lines[number - 1] = lines[number - 1][:-1]
    path.write_bytes(b"\n".join(lines))


def test_what_a_run_goes_on_from_is_known_without_the_middle(long_run: Path) -> None:
    # Line 30 is of step 9: reading it would raise.
    damage(long_run, 30)
    for view in (Ledger.open(long_run), LedgerView.glance(long_run)):
        assert view.last_step() == 45
        assert view.step(0) == step(0)
        assert set(view.tasks(0)) == set(view.tasks(40)) == {"prompts", "train"}
        assert set(view.tasks(46)) == {"prompts"}
        assert view.effective_outputs(45) == view.artifacts(45) == {"out": REF}
        assert view.last_segment() == segment(2)
        assert next(view.newest_checkpoints()) == checkpoint(40)


@pytest.mark.parametrize("question", ["tasks", "steps", "checkpoints", "segments"])
def test_damage_in_the_middle_is_found_when_it_is_read(long_run: Path, question: str) -> None:
    damage(long_run, 30)
    with pytest.raises(UserError, match=rf"^{long_run}:30: not a ledger entry: Invalid JSON"):
        LedgerView.read(long_run)
    ledger = Ledger.open(long_run)
    for _ in range(2):
        with pytest.raises(UserError, match=rf"^{long_run}:30: not a ledger entry: Invalid JSON"):
            QUESTIONS[question](ledger, 10)


def test_damage_at_the_tail_is_found_at_once_and_named_by_its_line(long_run: Path) -> None:
    number = len(long_run.read_bytes().splitlines()) - 1
    damage(long_run, number)
    for read in (Ledger.open, LedgerView.glance, LedgerView.read):
        with pytest.raises(UserError, match=rf"^{long_run}:{number}: not a ledger entry: Invalid JSON"):
            read(long_run)


def test_with_a_checkpoint_the_process_and_the_last_crossing_are_said_again_and_count_once(long_run: Path) -> None:
    ledger, crossed = Ledger.open(long_run), crossing(46)
    for entry in (segment(3), step(46), crossed, checkpoint(46), *map(step, range(47, 67)), checkpoint(66)):
        ledger.append(entry)
    for view in (ledger, LedgerView.read(long_run)):
        assert view.segments() == [segment(1), segment(2), segment(3)]
        assert view.bounds(1) == [crossed]
    # Line 30 is of step 9: reading it would raise.
    damage(long_run, 30)
    glance = LedgerView.glance(long_run)
    assert glance.last_segment() == segment(3)
    assert glance.last_bound() == crossed


def test_opening_costs_what_the_tail_costs(path: Path) -> None:
    """Of a ledger with a hole of a terabyte in its middle only the ends are read."""
    ledger = Ledger.open(path)
    for entry in (segment(1), task(0, "warm_start"), step(0), step(1)):
        ledger.append(entry)
    ledger.close()
    with path.open("r+b") as file:
        file.seek(1 << 40)
        entries = (step(18), step(19), step(20), segment(1), checkpoint(20), step(21))
        file.write(b"\n" + b"".join(entry.model_dump_json().encode() + b"\n" for entry in entries))
    ledger = Ledger.open(path)
    assert ledger.last_step() == 21
    assert ledger.step(0) == step(0)
    ledger.append(step(22))
    assert LedgerView.glance(path).last_step() == 22


def test_a_glance_answers_for_its_moment(long_run: Path) -> None:
    glance = LedgerView.glance(long_run)
    Ledger.open(long_run).append(step(46))
    assert glance.last_step() == 45
    assert max(glance.steps()) == 45, "read later, and not further"


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_redo_after_the_last_checkpoint_counts_for_its_step(long_run: Path, question: str) -> None:
    Ledger.open(long_run).append(redo(0, "train", "policy"), redo(10, "train", "policy"))
    for number in (0, 10, 40, 46):
        glance, whole = LedgerView.glance(long_run), LedgerView.read(long_run)
        assert QUESTIONS[question](glance, number) == QUESTIONS[question](whole, number)
    assert LedgerView.glance(long_run).inexact_steps() == [0, 10]


@pytest.mark.parametrize(("started", "cut"), [(0.5, False), (1.5, True), (5.5, False)])
def test_a_step_is_cut_where_a_process_began_within_it(path: Path, started: float, cut: bool) -> None:
    ledger = Ledger.open(path)
    ledger.append(SegmentEntry(pid=1, host="h", code_version="c", started=0.25))
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


def test_what_an_append_refuses_is_what_reading_refuses(path: Path) -> None:
    """Entries of one append follow one another as those of several do."""
    ledger = Ledger.open(path)
    ledger.append(task(0, "train"))
    before = path.read_bytes()
    for entries in ((step(3), task(2, "train")), (redo(1, "train", "k"), task(1, "train"))):
        with pytest.raises(AssertionError, match=r"after step 3|not done before"):
            ledger.append(*entries)
    assert path.read_bytes() == before
    assert ledger.last_step() is None, "what was refused is not in the index"
    ledger.append(task(1, "train"), redo(1, "train", "k"), crossing(1))
    assert list(LedgerView.read(path).redone(1)) == list(ledger.redone(1)) == ["train"]
    assert LedgerView.read(path).bounds(1) == ledger.bounds(1) == [crossing(1)]


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (step(2), "an entry of step 2 after step 3"),
        (redo(4, "train", "k"), "a redo of step 4, which was not done before"),
        (
            BoundEntry(step=4, bound="b", action="warn", reason="r"),
            "a bound crossed by step 4, which was not done before",
        ),
    ],
)
def test_an_entry_out_of_the_order_of_the_steps_is_refused(path: Path, entry: Entry, reason: str) -> None:
    ledger = Ledger.open(path)
    ledger.append(task(3, "train"))
    with pytest.raises(AssertionError, match=f"^{reason}"):
        ledger.append(entry)
    with path.open("a") as file:
        file.write(entry.model_dump_json() + "\n")
    with pytest.raises(UserError, match=rf"^{path}:2: not in the order of the steps: {reason}$"):
        LedgerView.read(path)
