"""The stream of completions of a run that generates ahead.

Prompts enter in the order of the data and leave in it. A prompt of step n enters at the earliest under policy
n - 1 - `max_staleness`; so no token that a step learns from is older. A tick is a token that each completion in flight
wrote or could have.

`Stream.complete` is the first part of a step, under the newest policy, and `run_ahead` is beside the update. Then the
next policy is loaded, and what is in flight goes on with it, its cache computed anew.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor

from fp8core.rollout.engine import Completion, PromptGroup

Generate = Callable[[Sequence[PromptGroup], Sequence["GroupPlace"]], Iterable[list[Completion]]]
"""From groups, which are numbered as their places are, to their completions, as an engine gives them."""


@dataclass
class Row:
    """A completion, complete or not, of the step `batch`.

    Attributes:
        versions: of each token, that of the policy that wrote it.
        finish: empty while it is in flight.
        ended: the tick at which the last token was written.
        written, turns: of an episode: tokens of the policy, and rows of kind `turns` without place.
        experts: as of a completion.
    """

    batch: int
    group: int
    sample: int
    prompt_id: str
    seed: int
    prompt_tokens: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: str = ""
    ended: int = 0
    written: list[bool] = field(default_factory=list)
    turns: list[dict[str, Any]] = field(default_factory=list)
    experts: Tensor | None = None

    def anew(self) -> "Row":
        return Row(self.batch, self.group, self.sample, self.prompt_id, self.seed, self.prompt_tokens)


def group_of(number: int, rows: Sequence[Row]) -> PromptGroup:
    return PromptGroup(
        group=number,
        prompt_id=rows[0].prompt_id,
        prompt=tuple(rows[0].prompt_tokens),
        samples=tuple(row.sample for row in rows),
        seeds=tuple(row.seed for row in rows),
    )


GroupPlace = tuple[int, int]
"""Batch and group of a prompt."""
Enter = Callable[[int, int], list[Row]]
"""From the place of a prompt to its completions, of which nothing is written."""


class StreamLimits(NamedTuple):
    """Prompts of a step, versions that a token may be old, and prompts that may be in flight (None: all of these)."""

    prompts: int
    staleness: int
    in_flight: int | None


class Stream:
    """The prompts that have entered and not left, in their order."""

    def __init__(self, rows: Iterable[Row], pace: StreamLimits, left: int) -> None:
        self._groups: dict[GroupPlace, list[Row]] = defaultdict(list)
        for row in rows:
            self._groups[row.batch, row.group].append(row)
        self.pace = pace
        newest = max(self._groups, default=(left, pace.prompts - 1))
        self._next = (newest[0] - 1) * pace.prompts + newest[1] + 1
        self.tick = max((row.ended for row in self.rows), default=0)

    @property
    def rows(self) -> list[Row]:
        return [row for place in sorted(self._groups) for row in self._groups[place]]

    def in_flight(self, batch: int | None = None) -> list[GroupPlace]:
        return [
            place
            for place in sorted(self._groups)
            if batch in (None, place[0]) and any(not row.finish for row in self._groups[place])
        ]

    def whole(self) -> list[int]:
        entered = Counter(batch for batch, _ in self._groups)
        open_ = {batch for batch, _ in self.in_flight()}
        return sorted(each for each, prompts in entered.items() if prompts == self.pace.prompts and each not in open_)

    def admit(self, version: int, enter: Enter) -> None:
        # Prompts that may have entered under this policy, since the run began.
        most = self.pace.in_flight
        last = (version + 1 + self.pace.staleness) * self.pace.prompts
        room = last if most is None else most - len(self.in_flight())
        for number in range(self._next, min(last, self._next + max(0, room))):
            place = number // self.pace.prompts + 1, number % self.pace.prompts
            self._groups[place] = enter(*place)
            self._next = number + 1

    def write(
        self,
        version: int,
        due: Sequence[GroupPlace],
        room: int | None,
        generate: Generate,
        others: Sequence[GroupPlace] = (),
    ) -> int:
        """Let prompts write, each completion at most `room`; returns the ticks that it took.

        That is what the policy wrote of the longest: tokens of an environment take none. Those of `others` keep no more
        than the longest of those of `due` has.
        """
        places = [*due, *others]
        groups = list[PromptGroup]()
        open_ = dict[GroupPlace, Row]()
        for number, place in enumerate(places):
            rows = [row for row in self._groups[place] if not row.finish]
            open_ |= {(number, row.sample): row for row in rows}
            prefix_tokens = tuple(tuple(row.tokens) for row in rows) if any(row.tokens for row in rows) else ()
            max_tokens = () if room is None else (room,) * len(rows)
            groups.append(replace(group_of(number, rows), prefix_tokens=prefix_tokens, max_tokens=max_tokens))
        completions = [done for finished in generate(groups, places) for done in finished]
        longest = max((len(done.tokens) for done in completions if done.group < len(due)), default=0)
        for done in completions:
            if not done.tokens and done.finish == "open":
                continue
            row = open_.pop((done.group, done.sample))
            length = min(longest, len(done.tokens))
            row.tokens += done.tokens[:length]
            row.logprobs += done.logprobs[:length]
            row.versions += [version] * length
            row.experts = done.experts
            if done.finish != "open" and length == len(done.tokens):
                row.finish = done.finish
                row.ended = self.tick + done.length
        assert not open_, "the engine left a completion as it was, so nothing would ever end"
        return max((done.length for done in completions if done.group < len(due)), default=0)

    def complete(self, step: int, chunk: int | None, generate: Generate, enter: Enter) -> list[Row]:
        """Write until the prompts of a step are complete, under the policy before it; these leave.

        `chunk`: tokens that each completion in flight may write at a time; None lets the step's own alone write.
        """
        self.admit(step - 1, enter)
        while self.in_flight(step):
            while due := self.in_flight(step):
                others = [] if chunk is None else [place for place in self.in_flight() if place not in due]
                self.tick += self.write(step - 1, due, chunk, generate, others)
            self.admit(step - 1, enter)
        return [row for group in range(self.pace.prompts) for row in self._groups.pop((step, group))]


def run_ahead(
    stream: Stream, version: int, chunks: Iterable[int | None], generate: Generate, enter: Enter
) -> list[int]:
    """Write beside an update, under the policy that it starts from, chunk by chunk, until all is complete.

    The chunks that were written, which it returns, are all that decides about the stream: a call with these gives it
    again.
    """
    written = list[int]()
    stream.admit(version, enter)
    for chunk in chunks:
        if not (due := stream.in_flight()):
            break
        ticks = stream.write(version, due, chunk, generate)
        stream.tick += ticks
        written.append(ticks if chunk is None else chunk)
        stream.admit(version, enter)
    return written


def chunks_of(tokens: int, chunk: int) -> Iterator[int]:
    for start in range(0, tokens, chunk):
        yield min(chunk, tokens - start)
