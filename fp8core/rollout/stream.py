"""The stream of completions of a run that generates ahead: what is in flight or waits for its step, and how it goes on.

Prompts enter in the order of the data and leave in that order, so nothing is to be decided about them. Step n learns
from its own prompts. A prompt of step n enters at the earliest under policy n - 1 - `max_staleness`; so no token that a
step learns from is older. Within one segment all completions write at the same pace, a token at a time:

- `finish` is the first part of a step, under the newest policy: it ends when the prompts of the step are complete.
- `run_ahead` is beside the update, under the same policy, in chunks: it ends when its chunks do, or all is complete.

Then the next policy is loaded, and what is in flight goes on with it, its cache computed anew. So a token is a function
of its seed, its position, what stands before it, and the version that wrote it; the stream has a version a token.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fp8core.rollout.engine import Completion, PromptGroup

Generate = Callable[[Sequence[PromptGroup], Sequence["Place"]], Iterable[list[Completion]]]
"""From groups, which are numbered as their places are, to their completions, as an engine gives them."""


@dataclass
class Row:
    """A completion, complete or not.

    Attributes:
        batch: the step whose prompt it answers.
        versions: of each token, that of the policy that wrote it.
        finish: as a completion's; empty while it is in flight.
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


Place = tuple[int, int]
"""Batch and group of a prompt."""
Enter = Callable[[int, int], list[Row]]
"""From the place of a prompt to its completions, of which nothing is written."""


class Pace(NamedTuple):
    """Prompts of a step, versions that a token may be old, and prompts that may be in flight (None: all of these)."""

    prompts: int
    staleness: int
    in_flight: int | None


class Stream:
    """The prompts that have entered and not left, in their order; `prompts` of a step gives those that enter."""

    def __init__(self, rows: Iterable[Row], pace: Pace, left: int) -> None:
        """`left`: steps whose prompts are gone."""
        self._groups: dict[Place, list[Row]] = defaultdict(list)
        for row in rows:
            self._groups[row.batch, row.group].append(row)
        self._pace = pace
        newest = max(self._groups, default=(left, pace.prompts - 1))
        self._next = (newest[0] - 1) * pace.prompts + newest[1] + 1

    @property
    def rows(self) -> list[Row]:
        """All of them, in order."""
        return [row for place in sorted(self._groups) for row in self._groups[place]]

    def in_flight(self, batch: int | None = None) -> list[Place]:
        """Prompts with a completion that is not complete, of one step or of all."""
        return [
            place
            for place in sorted(self._groups)
            if batch in (None, place[0]) and any(not row.finish for row in self._groups[place])
        ]

    def admit(self, version: int, enter: Enter) -> list[Place]:
        """Let as many prompts in as staleness and `max_inflight_prompts` allow under a policy; returns which."""
        last = (version + 1 + self._pace.staleness) * self._pace.prompts
        most, entered = self._pace.in_flight, list[Place]()
        room = last if most is None else most - len(self.in_flight())
        while self._next < last and len(entered) < room:
            place = self._next // self._pace.prompts + 1, self._next % self._pace.prompts
            self._groups[place] = enter(*place)
            self._next += 1
            entered.append(place)
        return entered

    def write(self, version: int, rooms: dict[Place, int | None], generate: Generate) -> dict[Place, int]:
        """Let prompts write, each completion of one at most its room; returns how many tokens the longest wrote."""
        places, asked = list(rooms), list[PromptGroup]()
        for number, place in enumerate(places):
            rows = [row for row in self._groups[place] if not row.finish]
            asked.append(
                PromptGroup(
                    group=number,
                    prompt_id=rows[0].prompt_id,
                    prompt=tuple(rows[0].prompt_tokens),
                    samples=tuple(row.sample for row in rows),
                    seeds=tuple(row.seed for row in rows),
                    begun=tuple(tuple(row.tokens) for row in rows) if any(row.tokens for row in rows) else (),
                    room=() if (room := rooms[place]) is None else (room,) * len(rows),
                )
            )
        wrote = dict[Place, int]()
        for done in (completion for finished in generate(asked, places) for completion in finished):
            place = places[done.group]
            (row,) = (row for row in self._groups[place] if row.sample == done.sample)
            row.tokens += done.tokens
            row.logprobs += done.logprobs
            row.versions += [version] * len(done.tokens)
            row.finish = "" if done.finish == "open" else done.finish
            wrote[place] = max(wrote.get(place, 0), len(done.tokens))
        return wrote

    def take(self, batch: int) -> list[Row]:
        """The completions of a step, which leave."""
        assert not self.in_flight(batch), "a step takes what is complete"
        return [row for group in range(self._pace.prompts) for row in self._groups.pop((batch, group))]


def finish(stream: Stream, batch: int, generate: Generate, enter: Enter) -> list[Row]:
    """Write until the prompts of a step are complete, under the policy before it; these leave."""
    version = batch - 1
    stream.admit(version, enter)
    while due := stream.in_flight(batch):
        ticks = max(stream.write(version, dict.fromkeys(due, None), generate).values())
        if others := stream.in_flight():
            stream.write(version, dict.fromkeys(others, ticks), generate)
        stream.admit(version, enter)
    return stream.take(batch)


def run_ahead(
    stream: Stream, version: int, chunks: Iterable[int | None], generate: Generate, enter: Enter
) -> list[int]:
    """Write beside an update, under the policy that it starts from, chunk by chunk, until all is complete.

    A prompt that is complete makes room for the next one when its chunk ends. So the chunks that were written, which
    it returns, are all that decides about the stream: a call with these gives it again.

    Args:
        stream: what is in flight goes on.
        version: of the policy.
        chunks: tokens that each completion may write, one after the other; None: to its end.
        generate: the engine.
        enter: makes the completions of a prompt that enters.
    """
    written = list[int]()
    stream.admit(version, enter)
    for chunk in chunks:
        if not (due := stream.in_flight()):
            break
        longest = max(stream.write(version, dict.fromkeys(due, chunk), generate).values())
        written.append(longest if chunk is None else chunk)
        stream.admit(version, enter)
    return written


def chunks_of(tokens: int, chunk: int) -> Iterator[int]:
    """A number of tokens in chunks, the last of which may be smaller."""
    for begun in range(0, tokens, chunk):
        yield min(chunk, tokens - begun)
