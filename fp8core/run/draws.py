"""The prompts of steps where these depend on use: a step may draw more than its own, or some prompts less often.

Draws are numbered in the order of the source, from its step 1 on, so that an epoch has each problem once. The artifact
`draws` has the next number and the draws of steps that have begun. Its streaks are each prompt's last groups in a row
that were all right.
"""

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from fp8core.data.prompt import Problem
from fp8core.run.context import StepContext
from fp8core.store.artifacts import Ref

NO_DRAWS: dict[str, Any] = {"next": 0, "steps": {}, "streaks": {}}
_RETIRED_ONE_IN = 4
"""Share of the draws of a retired prompt that are not passed over."""


class Draws:
    def __init__(self, run: StepContext, state: Ref) -> None:
        content = run.store.get_json(state)
        self._run = run
        self._next: int = content["next"]
        self._steps: dict[int, list[int]] = {int(step): draws for step, draws in content["steps"].items()}
        self._streaks: dict[str, int] = content["streaks"]
        self._problems: dict[int, list[Problem]] = {}
        self._closed = 0

    def of_step(self, step: int) -> list[int]:
        """By group; drawn now for a step that has none."""
        if step not in self._steps:
            self.extend(step, self._run.config.rollout.drawn_prompts)
        return self._steps[step]

    def extend(self, step: int, count: int) -> None:
        self._steps.setdefault(step, []).extend(islice(self._following(), count))

    def problem(self, draw: int) -> Problem:
        count = self._run.config.rollout.drawn_prompts
        step, place = divmod(draw, count)
        if step not in self._problems:
            self._problems[step] = self._run.source.training(step + 1, count, self._run.config.seed)
        return self._problems[step][place]

    def close_step(self, step: int, visits: Iterable[Mapping[str, Any]]) -> None:
        """At the end of a step; `visits`: rows of kind `visits`, in order."""
        self._closed = step
        if self._run.config.rollout.retire_after is None:
            return
        for visit in visits:
            before = self._streaks.pop(visit["prompt_id"], 0)
            if visit["right"]:
                self._streaks[visit["prompt_id"]] = before + 1

    def stored(self) -> Ref:
        steps = {str(step): draws for step, draws in self._steps.items() if step > self._closed}
        return self._run.store.put_json("draws", {"next": self._next, "steps": steps, "streaks": self._streaks})

    def _following(self) -> Iterator[int]:
        config = self._run.config
        retire_after = config.rollout.retire_after or math.inf
        while True:
            draw = self._next
            self._next += 1
            is_retired = self._streaks.get(self.problem(draw).prompt_id, 0) >= retire_after
            # The number of the draw decides, so that no source has to know its epochs.
            if not is_retired or zlib.crc32(f"{config.seed}/{draw}".encode()) % _RETIRED_ONE_IN == 0:
                yield draw
