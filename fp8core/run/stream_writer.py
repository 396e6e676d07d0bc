"""The writer of a step's stream: episodes, durable as they end, of one turn or with an environment."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from types import MappingProxyType
from typing import Any, cast

import pyarrow as pa

from fp8core.config.run import RunConfig
from fp8core.progress import tell_progress
from fp8core.rl.batch import routes, routes_column
from fp8core.rollout.engine import Completion, Finish, PromptGroup, sample_seed
from fp8core.rollout.episodes import Episode
from fp8core.rollout.stream import GroupPlace, Row, Stream, StreamLimits
from fp8core.run.context import StepContext
from fp8core.run.episodes import EpisodePlayer, pool_of, prefix_of_turns, seconds_of
from fp8core.run.rollouts import prompt_table, row_of
from fp8core.store.artifacts import Ref
from fp8core.store.tables import EXPERTS, PLAYED_EPISODES, STREAM, STREAM_OF_EPISODES, TURNS

_Sample = tuple[int, int, int]
"""Batch, group and sample."""
# Groups of evaluations have smaller numbers.
_FIRST_NUMBER = 1 << 30


class StreamPrompts:
    def __init__(self, run: StepContext, batches: Mapping[int, pa.Table] = MappingProxyType({})) -> None:
        self._run = run
        self._batches = {**batches}

    def _batch(self, batch: int) -> pa.Table:
        if batch not in self._batches:
            config = self._run.config
            problems = self._run.source.training(batch, config.rollout.drawn_prompts, config.seed)
            self._batches[batch] = prompt_table(self._run, problems)
        return self._batches[batch]

    def row(self, batch: int, group: int) -> dict[str, Any]:
        (row,) = self._batch(batch).slice(group, 1).to_pylist()
        prompt: dict[str, Any] = row
        return prompt

    def enter(self, batch: int, group: int) -> list[Row]:
        row = self.row(batch, group)
        config = self._run.config
        return [
            Row(batch, group, i, row["prompt_id"], sample_seed(config.seed, batch, group, i), row["tokens"])
            for i in range(config.rollout.group_size)
        ]

    def table(self, places: Sequence[GroupPlace]) -> pa.Table:
        table = pa.concat_tables([self._batch(batch).slice(group, 1) for batch, group in places])
        numbers = pa.array(range(len(places)), table.schema.field("group").type)
        return table.set_column(table.schema.get_field_index("group"), table.schema.field("group"), numbers)


class StreamWriter:
    """Episodes by the run's engine and environment; one that is over is durable, and is not played again."""

    def __init__(
        self,
        run: StepContext,
        index: int,
        source: StreamPrompts,
        rows: Sequence[Row],
        on_end: Callable[[list[Row]], None] = lambda rows: None,
    ) -> None:
        """`on_end` hears of each group of rows that have become durable."""
        self._run = run
        self._index = index
        self._source = source
        self._on_end = on_end
        self._player = EpisodePlayer.of(run.config, run.tokenizer, run.arch)
        self._sampling = replace(self._player.sampling(), report_experts=run.config.rollout.router_replay)
        self._shards = run.store.shards(index)
        # The stream writes into its own rows.
        copies = [replace(row, tokens=[*row.tokens], logprobs=[*row.logprobs]) for row in rows]
        # All of a completion, as it was stored or when it was over, else its place, prompt and seed.
        self._rows = {_sample(row): row for row in copies if row.tokens and not row.finish}
        # Of each part that this step asked for: tokens before it -> tokens after it.
        self._parts: dict[_Sample, dict[int, int]] = defaultdict(dict)
        # Those that go on and that this process plays.
        self._open: dict[_Sample, Episode] = {}
        table = self._shards.read()
        if table is not None:
            experts = routes(table["experts"]) if "experts" in table.column_names else [None] * len(table)
            for values, row_experts in zip(table.select(PLAYED_EPISODES.names).to_pylist(), experts, strict=True):
                parts = dict(values.pop("parts"))
                row = Row(**values, experts=row_experts)
                self._rows[_sample(row)], self._parts[_sample(row)] = row, parts

    def __call__(self, groups: Sequence[PromptGroup], places: Sequence[GroupPlace]) -> Iterator[list[Completion]]:
        missing = list[PromptGroup]()
        over = {key for key, row in self._rows.items() if row.finish}
        for group in groups:
            place = places[group.group]
            durable = {sample for sample in group.samples if (*place, sample) in over}
            yield [
                self._next_part((*place, sample), group, i)
                for i, sample in enumerate(group.samples)
                if sample in durable
            ]
            if (missing_part := group.without(durable)).samples:
                missing.append(missing_part)
        if missing:
            yield from self._play(missing, places)

    def _next_part(self, key: _Sample, group: PromptGroup, i: int) -> Completion:
        """Of a completion that is over, what is asked for now."""
        row = self._rows[key]
        before = len(group.prefix_of(i))
        end = self._parts[key].get(before, before + group.max_tokens_of(i, self._sampling.max_new_tokens))
        finish = cast(Finish, row.finish if end >= len(row.tokens) else "open")
        tokens = row.tokens[:end]
        logprobs = row.logprobs[:end]
        policy_mask = row.written[:end]
        return Completion(group.group, row.sample, tokens, logprobs, finish, row.experts, policy_mask).rest(before)

    def _play(self, missing: Sequence[PromptGroup], places: Sequence[GroupPlace]) -> Iterator[list[Completion]]:
        run = self._run
        by_number = {self._number(places[group.group]): group for group in missing}
        groups = [replace(group, group=number) for number, group in by_number.items()]
        prompts = [{**self._source.row(*places[group.group]), "group": number} for number, group in by_number.items()]
        prefixes = {
            (number, sample): self._open.get(key) or prefix_of_turns(row.tokens, row.logprobs, row.turns)
            for number, group in by_number.items()
            for sample in group.samples
            if (row := self._rows.get(key := (*places[group.group], sample))) is not None
        }
        pool = pool_of(run, self._recorded_turns)
        batches = self._player.play(run.engine, groups, prompts, self._sampling, pool, prefixes)
        count = 0
        total = sum(len(group.samples) for group in missing)
        # Where the step is halted, the error holds this frame: open episodes would stay with the environment.
        with closing(batches):
            for batch in batches:
                count += len(batch)
                tell_progress(count, total)
                yield self._next_parts(batch, by_number, places)
                run.check_halted()

    def _next_parts(
        self, batch: Sequence[Episode], by_number: Mapping[int, PromptGroup], places: Sequence[GroupPlace]
    ) -> list[Completion]:
        over = list[_Sample]()
        parts = list[Completion]()
        for one in batch:
            completion = one.completion
            group = by_number[one.completion.group]
            key = (*places[group.group], completion.sample)
            i = group.samples.index(completion.sample)
            new = Row(*key, group.prompt_id, group.seeds[i], [*group.prompt])
            row = self._rows.setdefault(key, new)
            before = len(group.prefix_of(i))
            self._parts[key][before] = len(completion.tokens)
            parts.append(replace(completion, group=group.group).rest(before))
            if one.goes_on:
                self._open[key] = one
                continue
            self._open.pop(key, None)
            self._rows[key] = row_of(one, row, self._run.tokenizer)
            self._run.reply_seconds.setdefault(self._index, []).extend(seconds_of(one))
            over.append(key)
        if over:
            rows = [self._rows[key] for key in over]
            row_dicts = [{**vars(self._rows[key]), "parts": [*self._parts[key].items()]} for key in over]
            table = pa.Table.from_pylist(row_dicts, schema=PLAYED_EPISODES)
            if experts := [row.experts for row in rows if row.experts is not None]:
                table = table.append_column(EXPERTS, routes_column(experts))
            self._shards.append(table)
            self._on_end(rows)
        return parts

    def attach_turns(self, rows: Sequence[Row]) -> None:
        for row in rows:
            key = _sample(row)
            length = len(row.tokens)
            if key not in self._rows or not length:
                continue
            whole = self._rows[key]
            if key in self._open:
                whole = row_of(self._open[key], whole, self._run.tokenizer)
            # Before a kill more of it may have been played than the stream has asked for since.
            turns = [turn for turn in whole.turns if turn["observation_end"] <= length]
            row.prompt_tokens = whole.prompt_tokens
            row.written = whole.written[:length]
            row.turns = whole.turns if row.finish else turns

    def has_more(self, rows: Sequence[Row]) -> bool:
        """True if more of them is durable than the stream has."""
        present = (self._rows.get(_sample(row)) for row in rows if not row.finish)
        return any(row is not None and bool(row.finish) for row in present)

    def _number(self, place: GroupPlace) -> int:
        batch, group = place
        return _FIRST_NUMBER + (batch - 1) * self._run.config.rollout.drawn_prompts + group

    def _recorded_turns(self) -> pa.Table:
        assert self._run.replayed is not None, "only a replay has no environment"
        store = self._run.store
        artifacts = self._run.replayed.artifacts(self._index)
        turns = store.get_table(artifacts[self._run.graph.artifact_of("turns")]).to_pylist()
        rows = [{**row, "group": self._number((self._index, row["group"]))} for row in turns]
        ahead = artifacts.get(self._run.graph.carries.get("stream", ""))
        for row in [] if ahead is None else store.get_table(ahead).to_pylist():
            number = self._number((row["batch"], row["group"]))
            rows += [{"group": number, "sample": row["sample"], **turn} for turn in row["turns"]]
        return pa.Table.from_pylist(rows, schema=TURNS)


def open_stream(run: StepContext, stream: Ref, newest: int) -> Stream:
    pipeline = run.config.pipeline
    prompts = run.config.rollout.drawn_prompts
    # One step ahead, episodes are played to their end: those of the next step enter when all of this step are over.
    whole = run.config.environment is not None and pipeline.mode == "one_step_off"
    most = prompts if whole else pipeline.max_inflight_prompts
    pace = StreamLimits(prompts, pipeline.max_staleness, most)
    rows = stream_rows(run.store.get_table(stream))
    return Stream(rows, pace, newest)


def chunk_together(config: RunConfig) -> int | None:
    """Tokens that completions of later steps write at a time beside those of this step; None: they wait."""
    # No episode can be cut where the longest one of others ends.
    together = config.pipeline.mode == "asynchronous" and config.environment is None
    return config.pipeline.chunk_tokens if together else None


def table_in_flight(run: StepContext, rows: Sequence[Row]) -> pa.Table:
    schema = STREAM if run.config.environment is None else STREAM_OF_EPISODES
    return stream_table(rows, schema)


def stream_rows(table: pa.Table) -> list[Row]:
    return [Row(**row) for row in table.to_pylist()]


def stream_table(rows: Iterable[Row], schema: pa.Schema) -> pa.Table:
    return pa.Table.from_pylist([vars(row) for row in rows], schema=schema)


def _sample(row: Row) -> _Sample:
    return row.batch, row.group, row.sample
