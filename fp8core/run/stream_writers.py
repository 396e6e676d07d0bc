"""Writers of a step's stream: completions by the engine, or episodes with an environment, durable as they come."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

import pyarrow as pa

from fp8core.rollout.engine import Completion, Finish, PromptGroup, sample_seed
from fp8core.rollout.episode import Begun, Episode
from fp8core.rollout.episodes import Pool
from fp8core.rollout.stream import GroupPlace, Row
from fp8core.run.context import RunContext
from fp8core.run.episodes import EpisodePlayer, RecordedPool, begun_of, seconds_of, turn_rows
from fp8core.run.rollouts import prompt_table, shards_of
from fp8core.store.tables import PLAYED_EPISODES, SEGMENTS, TURNS

_Sample = tuple[int, int, int]
"""Batch, group and sample."""
# Groups of evaluations have smaller numbers.
_FIRST_NUMBER = 1 << 30


class StreamPrompts:
    """The prompts of the data by their places."""

    def __init__(self, run: RunContext) -> None:
        self._run, self._batches = run, dict[int, pa.Table]()

    def _batch(self, batch: int) -> pa.Table:
        if batch not in self._batches:
            config = self._run.config
            problems = self._run.source.training(batch, config.rollout.drawn_prompts, config.seed)
            self._batches[batch] = prompt_table(self._run, problems)
        return self._batches[batch]

    def row(self, batch: int, group: int) -> dict[str, Any]:
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
        found = pa.concat_tables([self._batch(batch).slice(group, 1) for batch, group in places])
        numbers = pa.array(range(len(places)), found.schema.field("group").type)
        return found.set_column(found.schema.get_field_index("group"), found.schema.field("group"), numbers)


@dataclass
class Part:
    """The tokens of a completion from `before` on that segments wrote; `finish` as of a stream's row."""

    before: int
    tokens: list[int]
    logprobs: list[float]
    finish: str

    @property
    def end(self) -> int:
        return self.before + len(self.tokens)

    def replaced(self, newer: "Part") -> "Part":
        """`newer` after those before it, from which the engine went on; `newer` alone, where some are missing."""
        kept = newer.before - self.before
        if not 0 <= kept <= len(self.tokens):
            return newer
        tokens, logprobs = self.tokens[:kept] + newer.tokens, self.logprobs[:kept] + newer.logprobs
        return Part(self.before, tokens, logprobs, newer.finish)


class SegmentWriter:
    """Generation by the run's engine; finished groups of segments are durable as they come, and read after a kill."""

    def __init__(self, run: RunContext, index: int) -> None:
        self._run = run
        self._sampling = EpisodePlayer.of(run.config, run.tokenizer, run.arch).sampling()
        self._shards = shards_of(run, index, "segments")
        if damaged := self._shards.discard_damaged():
            run.console.note(f"step {index}: {damaged[0]}; its completions are generated again")
            self._shards.clear()  # Others may go on from what is gone.
        self._kept = dict[tuple[int, int, int], Part]()
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
        return self._kept.keys()

    def attach_turns(self, rows: Sequence[Row]) -> None:
        """Nothing: completions have no turns."""

    def has_more(self, rows: Sequence[Row]) -> bool:
        parts = ((row, self._kept.get(_sample(row))) for row in rows if not row.finish)
        return any(part and part.before <= len(row.tokens) < part.end for row, part in parts)

    def _keep(self, table: pa.Table) -> None:
        for row in table.to_pylist():
            place, part = tuple(row.pop(name) for name in ("batch", "group", "sample")), Part(**row)
            before = self._kept.get(place)
            self._kept[place] = part if before is None else before.replaced(part)

    def _stored_group(self, group: PromptGroup, place: GroupPlace) -> list[Completion] | None:
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


@dataclass
class PlayedEpisode:
    """An episode that has begun.

    `row`: all of it as it was stored, or when it was over. `ends`: tokens that it had after each part that was played
    in this step. `episode`: the unfinished one that this process plays; `row` then gives only its place, prompt and
    seed."""

    row: Row
    ends: list[int] = field(default_factory=list)
    episode: Episode | None = None

    @property
    def over(self) -> bool:
        return bool(self.row.finish)

    @property
    def state(self) -> Episode | Begun:
        return self.episode or begun_of(self.row.tokens, self.row.logprobs, self.row.turns)

    def rest(self, group: int, before: int) -> Completion:
        row, end = self.row, next(end for end in self.ends if end > before)
        finish = cast(Finish, row.finish if end == len(row.tokens) else "open")
        tokens, logprobs, written = row.tokens[:end], row.logprobs[:end], row.written[:end]
        return Completion(group, row.sample, tokens, logprobs, finish, written=written).rest(before)


class EpisodeWriter:
    """Episodes by the run's engine and environment; one that is over is durable, and is not played again."""

    def __init__(self, run: RunContext, index: int, source: StreamPrompts, rows: Sequence[Row]) -> None:
        self._run, self._index, self._source = run, index, source
        self._player = EpisodePlayer.of(run.config, run.tokenizer, run.arch)
        self._shards = shards_of(run, index, "episodes")
        for error in self._shards.discard_damaged():
            run.console.note(f"step {index}: {error}; its episodes are played again")
        # The stream writes into its own rows.
        copies = [replace(row, tokens=[*row.tokens], logprobs=[*row.logprobs]) for row in rows]
        known = [PlayedEpisode(row) for row in copies if row.turns and not row.finish]
        kept = self._shards.read()
        for stored in [] if kept is None else kept.to_pylist():
            ends = stored.pop("parts")
            known.append(PlayedEpisode(Row(**stored), ends))
        self._played = {_sample(each.row): each for each in known}

    def __call__(self, groups: Sequence[PromptGroup], places: Sequence[GroupPlace]) -> Iterator[list[Completion]]:
        missing, over = list[PromptGroup](), {*self.durable}
        for group in groups:
            place = places[group.group]
            kept = {sample for sample in group.samples if (*place, sample) in over}
            yield [
                self._played[*place, sample].rest(group.group, len(group.begun_of(i)))
                for i, sample in enumerate(group.samples)
                if sample in kept
            ]
            if (left := group.without(kept)).samples:
                missing.append(left)
        if missing:
            yield from self._play(missing, places)

    def _play(self, missing: Sequence[PromptGroup], places: Sequence[GroupPlace]) -> Iterator[list[Completion]]:
        run = self._run
        # The numbers under which groups are played.
        by_number = {self._number(places[group.group]): group for group in missing}
        prompts = [{**self._source.row(*places[group.group]), "group": number} for number, group in by_number.items()]
        begun = {
            (number, sample): each.state
            for number, group in by_number.items()
            for sample in group.samples
            if (each := self._played.get((*places[group.group], sample))) is not None
        }
        again = [replace(group, group=number, begun=(), room=()) for number, group in by_number.items()]
        pool: Pool = RecordedPool(self._recorded()) if run.environment is None else run.environment
        room = missing[0].room[0] if missing[0].room else None
        sampling = self._player.sampling()
        played = self._player.play(run.ready_engine(), again, prompts, sampling, pool, begun, room)
        # Where the step is halted, the error holds this frame: open episodes would stay with the environment.
        with closing(played):
            for batch in played:
                yield self._told(batch, by_number, places)
                run.refuse_halted()

    def _told(
        self, batch: Sequence[Episode], by_number: Mapping[int, PromptGroup], places: Sequence[GroupPlace]
    ) -> list[Completion]:
        """The new parts of played episodes; those that are over are durable then."""
        over, told = list[dict[str, Any]](), list[Completion]()
        for one in batch:
            done, group = one.completion, by_number[one.completion.group]
            key, index = (*places[group.group], done.sample), group.samples.index(done.sample)
            new = Row(*key, group.prompt_id, group.seeds[index], [*group.prompt])
            each = self._played.setdefault(key, PlayedEpisode(new))
            each.ends.append(len(done.tokens))
            each.episode = one
            if not one.goes_on:
                self._run.environment_seconds.setdefault(self._index, []).extend(seconds_of(one))
                each.row, each.episode = self._row(each), None
                over.append({**asdict(each.row), "parts": each.ends})
            told.append(replace(done, group=group.group).rest(len(group.begun_of(index))))
        if over:
            self._shards.append(pa.Table.from_pylist(over, schema=PLAYED_EPISODES))
        return told

    @property
    def durable(self) -> Iterable[_Sample]:
        return [key for key, each in self._played.items() if each.over]

    def attach_turns(self, rows: Sequence[Row]) -> None:
        for row in rows:
            played, told = self._played.get(_sample(row)), len(row.tokens)
            if played is None or not told:
                continue
            whole = self._row(played)
            # Before a kill more of it may have been played than the stream has asked for since.
            turns = [turn for turn in whole.turns if turn["observation_end"] <= told]
            row.prompt_tokens, row.written = whole.prompt_tokens, whole.written[:told]
            row.turns = whole.turns if row.finish else turns

    def has_more(self, rows: Sequence[Row]) -> bool:
        played = (self._played.get(_sample(row)) for row in rows if not row.finish)
        return any(each is not None and each.over for each in played)

    def _number(self, place: GroupPlace) -> int:
        batch, group = place
        return _FIRST_NUMBER + (batch - 1) * self._run.config.rollout.drawn_prompts + group

    def _row(self, played: PlayedEpisode) -> Row:
        if (episode := played.episode) is None:
            return played.row
        done = episode.completion
        return replace(
            played.row,
            prompt_tokens=[*episode.prompt],
            tokens=done.tokens,
            logprobs=done.logprobs,
            versions=[self._index - 1] * len(done.tokens),
            finish="" if episode.goes_on else done.finish,
            written=[True] * len(done.tokens) if done.written is None else done.written,
            turns=turn_rows(episode, self._run.tokenizer),
        )

    def _recorded(self) -> pa.Table:
        """The turns of the episodes in the step that a replay makes again."""
        assert self._run.replayed is not None, "only a replay has no environment"
        store, artifacts = self._run.directory.store, self._run.replayed.artifacts(self._index)
        finished = store.get_table(artifacts[self._run.graph.artifact_of("turns")]).to_pylist()
        rows = [{**row, "group": self._number((self._index, row["group"]))} for row in finished]
        for row in store.get_table(artifacts[self._run.graph.artifact_of("next_stream")]).to_pylist():
            number = self._number((row["batch"], row["group"]))
            rows += [{"group": number, "sample": row["sample"], **turn} for turn in row["turns"]]
        return pa.Table.from_pylist(rows, schema=TURNS)


def stream_rows(table: pa.Table) -> list[Row]:
    return [Row(**row) for row in table.to_pylist()]


def stream_table(rows: Iterable[Row], schema: pa.Schema) -> pa.Table:
    return pa.Table.from_pylist([asdict(row) for row in rows], schema=schema)


def _sample(row: Row) -> _Sample:
    return row.batch, row.group, row.sample


def _segment(done: Completion, group: PromptGroup, place: GroupPlace) -> dict[str, Any]:
    batch, number = place
    begun = group.begun[group.samples.index(done.sample)] if group.begun else ()
    finish = "" if done.finish == "open" else done.finish
    row = {"batch": batch, "group": number, "sample": done.sample, "before": len(begun)}
    return row | {"tokens": done.tokens, "logprobs": done.logprobs, "finish": finish}
