"""The order and the ages of what a run that generates ahead learns from, whatever the lengths and the settings are."""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from itertools import repeat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8core.rollout.engine import Completion, PromptGroup
from fp8core.run.stream import GroupPlace, Stream, StreamLimits, chunks_of, run_ahead

SAMPLES, LONGEST = 2, 12


def length(seed: int) -> int:
    """Of a whole completion: what an engine would find out."""
    return 1 + (seed * 2654435761 >> 7) % LONGEST


def generate(groups: Sequence[PromptGroup], places: Sequence[GroupPlace]) -> Iterator[list[Completion]]:
    """Token i of a completion is its seed and i."""
    for group in groups:
        done = []
        for i, (sample, seed) in enumerate(zip(group.samples, group.seeds, strict=True)):
            begun = len(group.prefix_tokens[i]) if group.prefix_tokens else 0
            assert begun < length(seed), "a complete one is asked for more"
            end = min(length(seed), begun + (group.max_tokens[i] if group.max_tokens else LONGEST))
            tokens = [100 * seed + place for place in range(begun, end)]
            done.append(
                Completion(group.group, sample, tokens, [0.0] * len(tokens), "stop" if end == length(seed) else "open")
            )
        yield done


def enter(batch: int, group: int) -> list[Completion]:
    first = 1000 * batch + 10 * group
    return [
        Completion(group, i, prompt_id=f"{batch}/{group}", seed=first + i, prompt_tokens=[1], batch=batch)
        for i in range(SAMPLES)
    ]


def trained(pace: StreamLimits, ahead: int | None, steps: int) -> list[list[Completion]]:
    """What each step learns from; the stream is stored and read between all parts.

    Without a limit ahead, prompts that are not a step's own wait for the part ahead.
    """
    rows, found = list[Completion](), []
    for step in range(1, steps + 1):
        stream = Stream(rows, pace, step - 1)
        found.append(stream.complete(step, None if ahead is None else 4, generate, enter))
        stream = Stream(stream.rows, pace, step)
        run_ahead(stream, step - 1, repeat(None) if ahead is None else chunks_of(ahead, 4), generate, enter)
        rows = stream.rows
    return found


paces = st.builds(StreamLimits, st.integers(1, 4), st.integers(0, 3), st.none() | st.integers(1, 6))


@settings(max_examples=200, deadline=None)
@given(pace=paces, ahead=st.none() | st.integers(0, 2 * LONGEST))
def test_every_step_has_its_own_prompts_complete_and_none_too_old(pace: StreamLimits, ahead: int | None) -> None:
    for step, rows in enumerate(trained(pace, ahead, 6), start=1):
        assert [(row.batch, row.group, row.sample) for row in rows] == [
            (step, group, sample) for group in range(pace.prompts) for sample in range(SAMPLES)
        ]
        for row in rows:
            assert row.tokens == [100 * row.seed + i for i in range(length(row.seed))]
            assert row.finish == "stop"
            assert row.versions == sorted(row.versions)
            assert 0 <= step - 1 - row.versions[0] <= pace.staleness
            assert row.versions[-1] <= step - 1


def test_updates_land_in_flight() -> None:
    """Completions of several versions, and with unlimited time ahead none."""
    spans = [len(set(row.versions)) for rows in trained(StreamLimits(3, 1, None), 3, 6) for row in rows]
    assert max(spans) == 2
    whole = trained(StreamLimits(3, 1, None), None, 6)
    assert {len(set(row.versions)) for rows in whole for row in rows} == {1}
    assert {step - row.versions[0] for step, rows in enumerate(whole[1:], start=1) for row in rows} == {1}


@pytest.mark.parametrize("chunk", [1, 2, 5, 50])
def test_the_others_write_with_the_prompts_of_a_step_or_wait_for_the_part_ahead(chunk: int) -> None:
    """One call of the engine a chunk has them all; without chunks nothing of theirs stands in the way of an update."""
    asked = list[set[int]]()

    def noted(groups: Sequence[PromptGroup], places: Sequence[GroupPlace]) -> Iterator[list[Completion]]:
        asked.append({batch for batch, _ in places})
        return generate(groups, places)

    cut = 0
    for step in range(1, 7):
        stream = Stream([], StreamLimits(2, 1, None), step - 1)
        longest = max(len(row.tokens) for row in stream.complete(step, chunk, noted, enter))
        assert asked[0] == {step, step + 1}
        assert len(asked) == -(-longest // chunk)
        assert [len(row.tokens) for row in stream.rows] == [min(length(row.seed), longest) for row in stream.rows]
        assert [not row.in_flight for row in stream.rows] == [length(row.seed) <= longest for row in stream.rows]
        cut += sum(row.in_flight for row in stream.rows)
        asked.clear()
    assert cut
    alone = Stream([], StreamLimits(3, 1, None), 0)
    alone.complete(1, None, noted, enter)
    assert asked == [{1}]
    assert [len(row.tokens) for row in alone.rows] == [0] * 6


@settings(max_examples=200, deadline=None)
@given(
    pace=paces, chunk=st.integers(1, 5), speeds=st.lists(st.integers(0, 9), min_size=5, max_size=5), cut=st.integers()
)
def test_a_recorded_schedule_gives_the_stream_of_the_clock(
    pace: StreamLimits, chunk: int, speeds: list[int], cut: int
) -> None:
    """Whatever the update takes: the chunks that were written decide, in one go or in two."""
    rows = list[Completion]()
    for step, most in enumerate(speeds, start=1):
        stream = Stream(rows, pace, step - 1)
        taken = stream.complete(step, chunk, generate, enter)
        assert all(0 <= step - 1 - row.versions[0] <= pace.staleness for row in taken)
        left = stream.rows
        live, again = (Stream(deepcopy(left), pace, step) for _ in range(2))
        chunks = run_ahead(live, step - 1, repeat(chunk, most), generate, enter)
        assert len(chunks) <= most
        first = cut % (len(chunks) + 1)
        for part in (chunks[:first], chunks[first:]):
            assert run_ahead(again, step - 1, part, generate, enter) == part
        assert again.rows == live.rows
        rows = live.rows
