"""Generate ahead of the update: the stream of completions, and what leaves it for a step (`rollout.stream`)."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import pyarrow as pa
import torch

from fp8core.config.steps import NoOptions
from fp8core.data.prompt import longest_prompt
from fp8core.environments.protocol import Key
from fp8core.rl.batch import column, pad, padded
from fp8core.rollout.engine import Completion, Finish, PromptGroup, Sampling, sample_seed
from fp8core.rollout.episodes import Begun, Episode, Pool
from fp8core.rollout.registry import continuation_of, longest_row
from fp8core.rollout.stream import (
    DroppingStream,
    Eviction,
    GroupPlace,
    Pace,
    Row,
    Stream,
    chunks_of,
    drain,
    finish_first,
    group_of,
    run_ahead,
)
from fp8core.rollout.stream import finish as finish_step
from fp8core.run.behaviour import behaviour_logprobs, verified_rows
from fp8core.run.context import RunContext
from fp8core.run.episodes import RecordedPool, begun_of, play, seconds_of, turn_rows
from fp8core.run.rollouts import check_episodes, prompt_table, rollout_table, shards_of
from fp8core.store.artifacts import Ref
from fp8core.store.tables import (
    LOGPROBS,
    PLAYED_EPISODES,
    ROLLOUTS,
    SEGMENTS,
    STREAM,
    STREAM_OF_EPISODES,
    TURNS,
    VERSIONS,
)
from fp8core.training.trainer import LogprobError, first_differing
from tasks.logprobs import token_batch
from tasks.step import step

_Sample = tuple[int, int, int]
"""Batch, group and sample."""
# Groups of evaluations have smaller numbers.
_FIRST_NUMBER = 1 << 30
_FINISHED = {
    "prompts": "prompts",
    "rollouts": "rollouts",
    "left": "stream",
    "behaviour": "behaviour",
    "evictions": "evictions",
}


@step(inputs={"stream": "stream", "policy": "policy", "scales": "scales"}, outputs=_FINISHED)
def finish(run: RunContext, index: int, options: NoOptions, stream: Ref, policy: Ref, scales: Ref) -> dict[str, Ref]:
    """Complete the prompts of a step under the newest policy; what else is in flight writes as long.

    `behaviour` has the log-probs of a share of the completions, by the weights of the version that wrote each token.
    """
    return _finished(run, index, stream)[0]


@step(inputs={"stream": "stream", "policy": "policy", "scales": "scales"}, outputs={"turns": "turns", **_FINISHED})
def finish_episodes(
    run: RunContext, index: int, options: NoOptions, stream: Ref, policy: Ref, scales: Ref
) -> dict[str, Ref]:
    """As `finish`, with an environment that answers: each episode is played to its end under one policy.

    Raises UserError: every episode ended before the policy's first turn, or by a failure of the environment.
    """
    outputs, rows = _finished(run, index, stream)
    return {"turns": run.directory.store.put_table("turns", _turns_of(rows)), **outputs}


def _finished(run: RunContext, index: int, stream: Ref) -> tuple[dict[str, Ref], list[Row]]:
    """The outputs of `finish`, and the completions of the step in order."""
    store, source = run.directory.store, _Prompts(run)
    opened = _opened(run, stream, index - 1)
    written = _writer(run, index, source, opened.rows)
    evicted = list[Eviction]()
    if isinstance(opened, DroppingStream):
        rows, evicted = finish_first(opened, index, run.config.pipeline.chunk_tokens, written, source.enter)
    else:
        pipeline = run.config.pipeline
        # A cache that is kept over updates is found by the tokens it is of: nothing of it may be written twice. Nor can
        # an episode be cut where the longest one of others ends.
        together = pipeline.mode == "asynchronous" and pipeline.recompute_kv_cache_after_weight_update
        together = together and run.config.environment is None
        rows = finish_step(opened, index, pipeline.chunk_tokens if together else None, written, source.enter)
    written.attach_turns([*rows, *opened.rows])
    # Before the log-probs are verified: some episode must have a token for that.
    check_episodes(run, index, _turns_of(rows))
    places = sorted({(row.batch, row.group) for row in rows})
    rows = [replace(row, group=places.index((row.batch, row.group))) for row in rows]
    rollouts = _rollouts(run, rows)
    outputs = {
        "prompts": store.put_table("prompts", source.table(places)),
        "rollouts": store.put_table("rollouts", rollouts),
        "left": store.put_table("stream", _table(run, opened.rows)),
        "behaviour": store.put_table("behaviour", _behaviour(run, index, rollouts, rows)),
        "evictions": store.put_json("evictions", [asdict(each) for each in evicted]),
    }
    return outputs, rows


@step(
    inputs={"left": "stream", "policy": "policy", "scales": "scales"},
    outputs={"next_stream": "stream", "schedule": "schedule"},
)
def ahead(run: RunContext, index: int, options: NoOptions, left: Ref, policy: Ref, scales: Ref) -> dict[str, Ref]:
    """Write beside the update, under the policy that it starts from: it runs while reward, log-probs and train do.

    `schedule` has what was written, which the clock may have decided: whoever makes the step again follows it.
    """
    store, opened, source = run.directory.store, _opened(run, left, index), _Prompts(run)
    written = _writer(run, index, source, opened.rows)
    in_flight = run.config.pipeline.in_flight_weight_updates
    # `drain` gives what a killed process wrote of what has begun; with a further chunk more prompts would enter.
    schedule = _chunks(
        run, index, lambda: written.has_more(opened.rows) if in_flight else opened.has_unbegun(written.durable)
    )
    chunks = run_ahead(opened, index - 1, schedule, written, source.enter)
    if not in_flight:
        drain(opened, index - 1, _until_halted(run), written)
    written.attach_turns(opened.rows)
    # A run cannot play again those of a stored stream. One prompt may well fail, so only whole steps are judged.
    for batch in opened.whole():
        check_episodes(run, index, _turns_of([row for row in opened.rows if row.batch == batch]))
    return {
        "next_stream": store.put_table("stream", _table(run, opened.rows)),
        "schedule": store.put_json("schedule", {"version": index - 1, "chunks": chunks}),
    }


def _turns_of(rows: Sequence[Row]) -> pa.Table:
    """The turns of finished episodes, as kind `turns`."""
    found = [{"group": row.group, "sample": row.sample, **turn} for row in rows for turn in row.turns]
    return pa.Table.from_pylist(found, schema=TURNS)


def _chunks(run: RunContext, index: int, has_more: Callable[[], bool]) -> Iterable[int | None]:
    """Tokens beside the update of a step, chunk by chunk; `has_more`: more of them are durable than the stream has."""
    pipeline = run.config.pipeline
    if pipeline.mode == "one_step_off":
        return itertools.repeat(None)
    if pipeline.ahead_tokens is not None:
        return chunks_of(pipeline.ahead_tokens, pipeline.chunk_tokens)
    for ledger in (run.followed, run.directory.ledger):
        stored = {} if ledger is None else {ref.kind: ref for ref in ledger.artifacts(index).values()}
        if "schedule" in stored:
            return _recorded(run, index, stored["schedule"])
    return _until_updated(run, index, has_more)


def _until_updated(run: RunContext, index: int, has_more: Callable[[], bool]) -> Iterator[int]:
    """Chunks until the ledger has the policy that the step makes, and the stream all that a killed process wrote."""
    updated, chunks = run.plan.carries["policy"], _until_halted(run)
    yield run.config.pipeline.chunk_tokens
    while updated not in run.directory.ledger.artifacts(index) or has_more():
        yield next(chunks)


def _until_halted(run: RunContext) -> Iterator[int]:
    """Chunks without an end (errors: `RunContext.refuse_halted`)."""
    while True:
        run.refuse_halted()
        yield run.config.pipeline.chunk_tokens


def _recorded(run: RunContext, index: int, schedule: Ref) -> list[int]:
    """The chunks of a stored schedule. All are equal, so those of a damaged one are found by its digest."""
    store, pipeline = run.directory.store, run.config.pipeline
    if store.damage(schedule) is not None:
        for count in range((1 + pipeline.max_staleness) * run.config.rollout.drawn_prompts * _longest(run) + 1):
            chunks = [pipeline.chunk_tokens] * count
            if store.digest_json({"version": index - 1, "chunks": chunks}) == schedule.digest:
                return chunks
    found: list[int] = store.get_json(schedule)["chunks"]
    return found


def _longest(run: RunContext) -> int:
    """Chunks of the longest completion, or of all turns of an episode."""
    environment, most = run.config.environment, run.config.rollout.max_new_tokens
    chunks = -(-most // run.config.pipeline.chunk_tokens)
    return chunks if environment is None else min(most, chunks + environment.max_turns)


def _opened(run: RunContext, stream: Ref, left: int) -> Stream:
    pipeline, prompts = run.config.pipeline, run.config.rollout.drawn_prompts
    # One step ahead, episodes are played to their end: those of the next step enter when all of this step are over.
    whole = run.config.environment is not None and pipeline.mode == "one_step_off"
    most = prompts if whole else pipeline.max_inflight_prompts
    pace = Pace(prompts, pipeline.max_staleness, most)
    rows = [Row(**row) for row in run.directory.store.get_table(stream).to_pylist()]
    return (Stream if pipeline.drop_or_wait == "wait" else DroppingStream)(rows, pace, left)


class _Prompts:
    """The prompts of the data by their places, as tables of kind `prompts` a batch."""

    def __init__(self, run: RunContext) -> None:
        self._run, self._batches = run, dict[int, pa.Table]()

    def _batch(self, batch: int) -> pa.Table:
        if batch not in self._batches:
            config = self._run.config
            problems = self._run.source.training(batch, config.rollout.drawn_prompts, config.seed)
            self._batches[batch] = prompt_table(self._run, problems)
        return self._batches[batch]

    def row(self, batch: int, group: int) -> dict[str, Any]:
        """A prompt as a row of kind `prompts`."""
        (row,) = self._batch(batch).slice(group, 1).to_pylist()
        found: dict[str, Any] = row
        return found

    def enter(self, batch: int, group: int) -> list[Row]:
        """The completions of a prompt that enters, with the seeds that a synchronous run has."""
        row, config = self.row(batch, group), self._run.config
        return [
            Row(batch, group, i, row["prompt_id"], sample_seed(config.seed, batch, group, i), row["tokens"])
            for i in range(config.rollout.group_size)
        ]

    def table(self, places: Sequence[GroupPlace]) -> pa.Table:
        """The prompts at these places, which are the groups of a step in this order."""
        found = pa.concat_tables([self._batch(batch).slice(group, 1) for batch, group in places])
        numbers = pa.array(range(len(places)), found.schema.field("group").type)
        return found.set_column(found.schema.get_field_index("group"), found.schema.field("group"), numbers)


@dataclass
class _Part:
    """The tokens of a completion from `before` on that segments wrote; `finish` as of a stream's row."""

    before: int
    tokens: list[int]
    logprobs: list[float]
    finish: str

    @property
    def end(self) -> int:
        return self.before + len(self.tokens)

    def replaced(self, newer: "_Part") -> "_Part":
        """`newer` after those before it, from which an engine went on; `newer` alone, where some of these are missing.

        An engine that goes on anew wrote other tokens than those that were here.
        """
        kept = newer.before - self.before
        if not 0 <= kept <= len(self.tokens):
            return newer
        tokens, logprobs = self.tokens[:kept] + newer.tokens, self.logprobs[:kept] + newer.logprobs
        return _Part(self.before, tokens, logprobs, newer.finish)

    def joined(self, other: "_Part") -> "_Part":
        """Both, which are equal where they overlap; `other` alone, where something between them is missing."""
        first, last = sorted((self, other), key=lambda part: part.before)
        if first.end < last.before:
            return other
        return first if first.end >= last.end else first.replaced(last)


class _SegmentWriter:
    """Generation by the run's engine; finished groups of segments are durable as they come.

    After a kill, stored segments are returned before the engine is called. All are of one policy: from any token on,
    the stored ones are those that the engine would write. Of an engine that goes on anew, only the newest count.
    """

    def __init__(self, run: RunContext, index: int) -> None:
        rollout = run.config.rollout
        self._run = run
        self._sampling = Sampling(rollout.temperature, rollout.max_new_tokens, run.tokenizer.eos_ids)
        self._shards = shards_of(run, index, "segments")
        self._equal = continuation_of(run.config) == "equal"
        damaged = self._shards.discard_damaged()
        for error in damaged:
            run.console.note(f"step {index}: {error}; its completions are generated again")
        if damaged and not self._equal:
            self._shards.clear()  # Others may go on from what is gone.
        self._kept = dict[tuple[int, int, int], _Part]()
        if (kept := self._shards.read()) is not None:
            self._keep(kept)

    def __call__(self, groups: Sequence[PromptGroup], places: Sequence[GroupPlace]) -> Iterator[list[Completion]]:
        missing = list[PromptGroup]()
        for group in groups:
            found = self._stored_group(group, places[group.group])
            if found is None:
                missing.append(group)
            else:
                yield found
        by_number = {group.group: group for group in missing}
        for finished in self._run.ready_engine().generate(missing, self._sampling) if missing else ():
            rows = [_segment(done, by_number[done.group], places[done.group]) for done in finished]
            table = pa.Table.from_pylist(rows, schema=SEGMENTS)
            self._shards.append(table)
            self._keep(table)
            yield finished
            self._run.refuse_halted()

    @property
    def durable(self) -> Iterable[_Sample]:
        """Completions of which something is stored."""
        return self._kept.keys()

    def attach_turns(self, rows: Sequence[Row]) -> None:
        """Nothing: completions have no turns."""

    def has_more(self, rows: Sequence[Row]) -> bool:
        """True if more of a row that is in flight is durable than it has."""
        parts = ((row, self._kept.get(_sample(row))) for row in rows if not row.finish)
        return any(part and part.before <= len(row.tokens) < part.end for row, part in parts)

    def _keep(self, table: pa.Table) -> None:
        for row in table.to_pylist():
            place, part = tuple(row.pop(name) for name in ("batch", "group", "sample")), _Part(**row)
            held = self._kept.get(place)
            if held is not None:
                part = held.joined(part) if self._equal else held.replaced(part)
            self._kept[place] = part

    def _stored_group(self, group: PromptGroup, place: GroupPlace) -> list[Completion] | None:
        """The completions of a group from what was kept, if all of them are there."""
        found = list[Completion]()
        for i, sample in enumerate(group.samples):
            part = self._kept.get((*place, sample))
            begun = len(group.begun[i]) if group.begun else 0
            room = group.room[i] if group.room else self._sampling.max_new_tokens
            if part is None or begun < part.before:
                return None
            start, end = begun - part.before, min(begun - part.before + room, len(part.tokens))
            ended = bool(part.finish) and end == len(part.tokens)
            if not ended and end - start < room:
                return None
            finish = cast(Finish, part.finish if ended else "open")
            found.append(Completion(group.group, sample, part.tokens[start:end], part.logprobs[start:end], finish))
        return found


class _EpisodeWriter:
    """Episodes by the run's engine and environment; one that is over is durable, and is not played again.

    All of it is of one policy. An episode may be played in several parts, which it has again after a kill.
    """

    def __init__(self, run: RunContext, index: int, source: _Prompts, rows: Sequence[Row]) -> None:
        """`rows`: of the stream, of which some may have begun."""
        rollout = run.config.rollout
        self._run, self._index, self._source = run, index, source
        self._sampling = Sampling(rollout.temperature, rollout.max_new_tokens, run.tokenizer.eos_ids)
        self._shards = shards_of(run, index, "episodes")
        for error in self._shards.discard_damaged():
            run.console.note(f"step {index}: {error}; its episodes are played again")
        kept = self._shards.read()
        self._over = dict[_Sample, tuple[Row, list[int]]]()
        for row in [] if kept is None else kept.to_pylist():
            parts, found = row.pop("parts"), Row(**row)
            self._over[_sample(found)] = found, parts
        # The stream writes into its own rows.
        self._begun = {
            _sample(row): replace(row, tokens=[*row.tokens], logprobs=[*row.logprobs]) for row in rows if row.turns
        }
        self._open, self._parts = dict[_Sample, tuple[Episode, PromptGroup]](), defaultdict[_Sample, list[int]](list)

    def __call__(self, groups: Sequence[PromptGroup], places: Sequence[GroupPlace]) -> Iterator[list[Completion]]:
        missing = list[PromptGroup]()
        for group in groups:
            place, begun = places[group.group], group.begun or ((),) * len(group.samples)
            kept = {sample for sample in group.samples if (*place, sample) in self._over}
            yield [
                self._stored_rest(group.group, (*place, sample), len(tokens))
                for sample, tokens in zip(group.samples, begun, strict=True)
                if sample in kept
            ]
            if (left := group.without(kept)).samples:
                missing.append(left)
        if missing:
            yield from self._play(missing, places)

    def _play(self, missing: Sequence[PromptGroup], places: Sequence[GroupPlace]) -> Iterator[list[Completion]]:
        run = self._run
        longest = longest_prompt(run.config, longest_row(run.config, run.arch))
        numbers = {group.group: self._number(places[group.group]) for group in missing}
        by_number = {numbers[group.group]: group for group in missing}
        again = [replace(group, group=number, begun=(), room=()) for number, group in by_number.items()]
        prompts = [{**self._source.row(*places[group.group]), "group": numbers[group.group]} for group in missing]
        begun = {
            (number, sample): state
            for number, group in by_number.items()
            for sample in group.samples
            if (state := self._state((*places[group.group], sample))) is not None
        }
        pool: Pool = RecordedPool(self._recorded()) if run.environment is None else run.environment
        room = missing[0].room[0] if missing[0].room else None
        engine, config, tokenizer = run.ready_engine(), run.config, run.tokenizer
        played = play(engine, again, self._sampling, config, tokenizer, prompts, longest, pool, begun, room)
        # Where the step is halted, the error holds this frame: open episodes would stay with the environment.
        with closing(played):
            yield from self._told(played, by_number, begun, places)

    def _told(
        self,
        played: Iterator[list[Episode]],
        by_number: Mapping[int, PromptGroup],
        begun: Mapping[Key, Begun | Episode],
        places: Sequence[GroupPlace],
    ) -> Iterator[list[Completion]]:
        run = self._run
        for batch in played:
            over, told = list[Row](), list[Completion]()
            for one in batch:
                done, group = one.completion, by_number[one.completion.group]
                key = (*places[group.group], done.sample)
                self._parts[key].append(len(done.tokens))
                self._open[key] = one, group
                if not one.goes_on:
                    over.append(self._row(one, group, key[:2]))
                before = len(group.begun[group.samples.index(done.sample)]) if group.begun else 0
                told.append(replace(done, group=group.group).rest(before))
                seconds = _new_seconds(one, begun.get((done.group, done.sample)))
                times = run.environment_seconds.setdefault(self._index, {})
                times.setdefault("/".join(map(str, key)), []).extend(seconds)
            if over:
                self._store(over)
            yield told
            run.refuse_halted()

    def _store(self, over: Sequence[Row]) -> None:
        """Make episodes durable that are over."""
        parts = [self._parts[_sample(row)] for row in over]
        rows = [{**asdict(row), "parts": ends} for row, ends in zip(over, parts, strict=True)]
        self._shards.append(pa.Table.from_pylist(rows, schema=PLAYED_EPISODES))
        self._over |= {_sample(row): (row, ends) for row, ends in zip(over, parts, strict=True)}

    @property
    def durable(self) -> Iterable[_Sample]:
        """Episodes that are stored: those that are over."""
        return self._over.keys()

    def attach_turns(self, rows: Sequence[Row]) -> None:
        """Give rows what their episodes have beside a completion."""
        for row in rows:
            key, told = _sample(row), len(row.tokens)
            if key in self._over:
                played = self._over[key][0]
            elif key in self._open:
                played = self._row(*self._open[key], key[:2])
            else:
                continue
            if told:
                # Before a kill more of it may have been played than the stream has asked for since.
                turns = [turn for turn in played.turns if turn["observation_end"] <= told]
                row.prompt_tokens, row.written = played.prompt_tokens, played.written[:told]
                row.turns = played.turns if row.finish else turns

    def has_more(self, rows: Sequence[Row]) -> bool:
        """True if an episode is over and durable whose row is in flight."""
        return any(not row.finish and _sample(row) in self._over for row in rows)

    def _state(self, key: _Sample) -> Episode | Begun | None:
        """An episode that goes on, as this process has it or as it was stored; None before it begins."""
        if key in self._open:
            return self._open[key][0]
        row = self._begun.get(key)
        return None if row is None else begun_of(row.tokens, row.logprobs, row.turns)

    def _stored_rest(self, group: int, key: _Sample, before: int) -> Completion:
        """The next part of an episode that is over, after so many tokens."""
        row, parts = self._over[key]
        end = next(part for part in parts if part > before)
        finish = cast(Finish, row.finish if end == len(row.tokens) else "open")
        tokens, logprobs, written = row.tokens[:end], row.logprobs[:end], row.written[:end]
        return Completion(group, row.sample, tokens, logprobs, finish, written=written).rest(before)

    def _number(self, place: GroupPlace) -> int:
        """The group of a place, by which an episode goes on."""
        batch, group = place
        return _FIRST_NUMBER + (batch - 1) * self._run.config.rollout.drawn_prompts + group

    def _row(self, episode: Episode, group: PromptGroup, place: GroupPlace) -> Row:
        done = episode.completion
        return Row(
            *place,
            done.sample,
            group.prompt_id,
            group.seeds[group.samples.index(done.sample)],
            list(episode.prompt),
            done.tokens,
            done.logprobs,
            [self._index - 1] * len(done.tokens),
            "" if episode.goes_on else done.finish,
            written=[True] * len(done.tokens) if done.written is None else done.written,
            turns=turn_rows(episode, self._run.tokenizer),
        )

    def _recorded(self) -> pa.Table:
        """The turns of the episodes in the step that a replay makes again, as kind `turns`."""
        assert self._run.followed is not None, "only a replay has no environment"
        store, artifacts = self._run.directory.store, self._run.followed.artifacts(self._index)
        finished = store.get_table(artifacts[self._run.plan.artifact_of("turns")]).to_pylist()
        rows = [{**row, "group": self._number((self._index, row["group"]))} for row in finished]
        for row in store.get_table(artifacts[self._run.plan.artifact_of("next_stream")]).to_pylist():
            number = self._number((row["batch"], row["group"]))
            rows += [{"group": number, "sample": row["sample"], **turn} for turn in row["turns"]]
        return pa.Table.from_pylist(rows, schema=TURNS)


def _sample(row: Row) -> _Sample:
    return row.batch, row.group, row.sample


def _new_seconds(episode: Episode, before: Episode | Begun | None) -> list[float]:
    """The times of the environment's answers that it has given since."""
    known = 0 if before is None else len(before.turns if isinstance(before, Episode) else before.ends)
    new = seconds_of(replace(episode, turns=episode.turns[known:]))
    return new if before is None else new[1:]


def _writer(run: RunContext, index: int, source: _Prompts, rows: Sequence[Row]) -> _SegmentWriter | _EpisodeWriter:
    """The writer of a step: the engine alone, or with an environment, for which `rows` are those of the stream."""
    return _SegmentWriter(run, index) if run.config.environment is None else _EpisodeWriter(run, index, source, rows)


def _segment(done: Completion, group: PromptGroup, place: GroupPlace) -> dict[str, Any]:
    """The new tokens of a completion as a row of kind `segments`."""
    batch, number = place
    begun = group.begun[group.samples.index(done.sample)] if group.begun else ()
    finish = "" if done.finish == "open" else done.finish
    row = {"batch": batch, "group": number, "sample": done.sample, "before": len(begun)}
    return row | {"tokens": done.tokens, "logprobs": done.logprobs, "finish": finish}


def _table(run: RunContext, rows: Sequence[Row]) -> pa.Table:
    schema = STREAM if run.config.environment is None else STREAM_OF_EPISODES
    return pa.Table.from_pylist([asdict(row) for row in rows], schema=schema)


def _completion(row: Row) -> Completion:
    written = row.written or None
    return Completion(row.group, row.sample, row.tokens, row.logprobs, cast(Finish, row.finish), written=written)


def _rollouts(run: RunContext, rows: Sequence[Row]) -> pa.Table:
    """The completions of a step as a table of kind `rollouts`; versions only where they can differ."""
    completions = [_completion(row) for row in rows]
    groups: dict[int, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    answered = [group_of(group, each) for group, each in groups.items()]
    table = rollout_table(run, completions, answered, ROLLOUTS, [row.prompt_tokens for row in rows])
    if run.config.pipeline.max_staleness == 0:
        return table
    return table.append_column(VERSIONS, pa.array([row.versions for row in rows], VERSIONS.type))


def _behaviour(run: RunContext, index: int, rollouts: pa.Table, rows: Sequence[Row]) -> pa.Table:
    """Log-probs and entropies of a share of the completions under the versions that wrote their tokens.

    Raises LogprobError: the loss takes the rollout's log-probs as they are, and one of these is not equal.
    """
    chosen = verified_rows(run, index, padded(rollouts["written"], torch.bool, False))
    versions = pad([rows[i].versions for i in chosen], torch.int64, -1)
    taken = rollouts.take(chosen)
    scored = behaviour_logprobs(run, token_batch(taken), versions)
    if run.config.logprobs.source == "rollout":
        for row, ours in zip(taken.to_pylist(), scored[0], strict=True):
            theirs, written = torch.tensor(row["logprobs"]), torch.tensor(row["written"])
            if differing := first_differing(theirs, ours[: len(theirs)], written):
                raise LogprobError(f"group {row['group']}, sample {row['sample']}, {differing}; no update was begun")
    lengths = (versions >= 0).sum(dim=1).numpy()
    columns = {
        "group": pa.array([rows[i].group for i in chosen], pa.int32()),
        "sample": pa.array([rows[i].sample for i in chosen], pa.int32()),
        "logprobs": column(scored[0], lengths),
        "entropy": column(scored[1], lengths),
    }
    return pa.table(columns, schema=LOGPROBS)
