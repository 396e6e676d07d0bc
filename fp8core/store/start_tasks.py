"""The tasks of step 0, which are no steps of the pipeline, and what they hand to the first iteration."""

from collections.abc import Mapping
from typing import Final, NamedTuple


class StartTask(NamedTuple):
    """A task of step 0.

    Attributes:
        stage: its name for people; the ledger has its result under the name of the step that does the same later.
        outputs: artifact -> kind.
    """

    stage: str
    outputs: Mapping[str, str]


START_TASKS: Final[Mapping[str, StartTask]] = {
    "warm_start": StartTask("warm_start", {"policy": "policy", "weights": "weights"}),
    "calibrate": StartTask("first_scales", {"scales": "scales"}),
    "evaluate": StartTask("first_evaluation", {"evaluation": "evaluation", "heldout_turns": "turns"}),
    "stream": StartTask("stream", {"stream": "stream"}),
    "precision_gap": StartTask("precision_gap", {"precision_gap": "precision_gap"}),
}
"""Name in the ledger -> task, in the order in which they run; not every run has the last two."""

CARRIED_FROM: Final[Mapping[str, str]] = {"policy": "warm_start", "scales": "calibrate", "stream": "stream"}
"""Artifact that an iteration may start from -> the task of step 0 that makes the first one."""
CARRIED_KINDS: Final[Mapping[str, str]] = {
    artifact: START_TASKS[task].outputs[artifact] for artifact, task in CARRIED_FROM.items()
}
