"""What a training does when it is beyond a bound of `alignment.stop`: the same with an orchestrator and without.

The ledger alone decides. It counts steps from the last crossing it holds, so that a training that was killed stops
where it would have stopped, and one that is continued after a pause or a failure gets `patience` steps again.
"""

from fp8core.alignment.bounds import Crossing, crossed
from fp8core.store.ledger import START, BoundEntry
from fp8core.workers.live import LiveRun
from tasks.commit import step_metrics
from tasks.restore import ensure


class BoundError(RuntimeError):
    """`alignment.stop.action` is fail, and a bound was crossed; the message names it."""


class TrainingPaused(Exception):
    """`alignment.stop.action` is pause, and a bound was crossed; the message names it."""


def crossing(run: LiveRun) -> Crossing | None:
    """The bound that the last committed steps were beyond and nothing was done about yet."""
    stop, last = run.config.alignment.stop, run.directory.ledger.last_step()
    assert last is not None, "begin() commits step 0"
    first = last - stop.patience + 1
    if not stop.bounded or first <= START or run.directory.ledger.bounds(first):
        return None
    steps = range(first, last + 1)
    for index in steps:
        ensure(run, index, {"metrics"})
    return crossed(stop, [step_metrics(run, index) for index in steps])


def carry_out(run: LiveRun, found: Crossing) -> None:
    """Note a crossing in the ledger and on the console; then warn, pause or fail.

    Raises:
        TrainingPaused, BoundError: as `alignment.stop.action` says.
    """
    action, step = run.config.alignment.stop.action, run.directory.ledger.last_step()
    assert step is not None, "a bound is crossed by a committed step"
    run.directory.ledger.append(BoundEntry(step=step, bound=found.bound, action=action, reason=found.reason))
    told = f"step {step}: {found.reason}"
    run.console.note(f"{action}: {told}")
    if action == "pause":
        raise TrainingPaused(f"paused after {told}")
    if action == "fail":
        raise BoundError(f"failed after {told}")
