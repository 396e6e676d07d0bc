"""The completions of a run that generates ahead, and their writer: whatever is over is durable.

Prompts enter in the order of the data and leave in it. A prompt of step n enters at the earliest under policy
n - 1 - `max_staleness`; so no token that a step learns from is older. A tick is a token that each completion in flight
wrote or could have.

`Stream.complete` is the first part of a step, under the newest policy, and `run_ahead` is beside the update. Then the
next policy is loaded, and what is in flight goes on with it, its cache computed anew.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import pyarrow as pa

from fp8core.config.run import RunConfig
from fp8core.environments.protocol import TurnRecord
from fp8core.progress import tell_progress
from fp8core.rewards.scorer import Key
from fp8core.rl.batch import routes
from fp8core.rollout.engine import Completion, PromptGroup, draft_counts, sample_seed
from fp8core.rollout.episodes import EpisodePlayer
from fp8core.run.context import StepContext
from fp8core.run.draws import Draws
from fp8core.run.rollouts import begin_verdicts, ends_of, pool_of, prompt_table, row_tables, turn_records, with_experts
from fp8core.store.artifacts import Ref
from fp8core.store.tables import PLAYED_EPISODES, STREAM, STREAM_OF_EPISODES

GroupPlace = tuple[int, int]
"""Batch and group of a prompt."""
Generate = Callable[[Sequence[PromptGroup], Sequence[GroupPlace]], Iterable[list[Completion]]]
"""From groups, which are numbered as their places are, to their completions, as an engine gives them."""
Enter = Callable[[int, int], list[Completion]]
"""From the place of a prompt to its completions, of which nothing is written."""
_Sample = tuple[int, int, int]
"""Batch, group and sample."""
# Groups of evaluations have smaller numbers.
_FIRST_NUMBER = 1 << 30


def group_of(number: int, rows: Sequence[Completion]) -> PromptGroup:
    return PromptGroup(
        group=number,
        prompt_id=rows[0].prompt_id,
        prompt=tuple(rows[0].prompt_tokens),
        samples=tuple(row.sample for row in rows),
        seeds=tuple(row.seed for row in rows),
    )


class StreamLimits(NamedTuple):
    """Prompts of a step, versions that a token may be old, and prompts that may be in flight (None: all of these)."""

    prompts: int
    staleness: int
    in_flight: int | None


class Stream:
    """The prompts that have entered and not left, in their order."""

    def __init__(self, rows: Iterable[Completion], pace: StreamLimits, last_batch: int) -> None:
        self._groups: dict[GroupPlace, list[Completion]] = defaultdict(list)
        for row in rows:
            self._groups[row.batch, row.group].append(row)
        self.pace = pace
        newest = max(self._groups, default=(last_batch, pace.prompts - 1))
        self._next = (newest[0] - 1) * pace.prompts + newest[1] + 1
        self.tick = max((row.ended for row in self.rows), default=0)

    @property
    def rows(self) -> list[Completion]:
        return [row for place in sorted(self._groups) for row in self._groups[place]]

    def in_flight(self, batch: int | None = None) -> list[GroupPlace]:
        return [
            place
            for place in sorted(self._groups)
            if batch in (None, place[0]) and any(row.in_flight for row in self._groups[place])
        ]

    def whole(self) -> list[int]:
        counts = Counter(batch for batch, _ in self._groups)
        open_ = {batch for batch, _ in self.in_flight()}
        return sorted(each for each, prompts in counts.items() if prompts == self.pace.prompts and each not in open_)

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
        open_ = dict[Key, Completion]()
        for number, place in enumerate(places):
            rows = [row for row in self._groups[place] if row.in_flight]
            open_ |= {(number, row.sample): row for row in rows}
            prefix_tokens = tuple(tuple(row.tokens) for row in rows) if any(row.tokens for row in rows) else ()
            max_tokens = () if room is None else (room,) * len(rows)
            groups.append(replace(group_of(number, rows), prefix_tokens=prefix_tokens, max_tokens=max_tokens))
        completions = [completion for finished in generate(groups, places) for completion in finished]
        longest = max((len(completion.tokens) for completion in completions if completion.group < len(due)), default=0)
        for completion in completions:
            if not completion.tokens and completion.in_flight:
                continue
            row = open_.pop(completion.key)
            length = min(longest, len(completion.tokens))
            row.tokens += completion.tokens[:length]
            row.logprobs += completion.logprobs[:length]
            row.versions += [version] * length
            row.experts = completion.experts
            if not completion.in_flight and length == len(completion.tokens):
                row.finish = completion.finish
                row.ended = self.tick + completion.length
        assert not open_, "the engine left a completion as it was, so nothing would ever end"
        return max((completion.length for completion in completions if completion.group < len(due)), default=0)

    def complete(self, step: int, chunk: int | None, generate: Generate, enter: Enter) -> list[Completion]:
        """Write until the prompts of a step are complete, under the policy before it; these leave.

        `chunk`: tokens that each completion in flight may write at a time; None lets the step's own alone write.
        """
        self.admit(step - 1, enter)
        while self.in_flight(step):
            while due := self.in_flight(step):
                others = [] if chunk is None else [place for place in self.in_flight() if place not in due]
                self.tick += self.write(step - 1, due, chunk, generate, others)
            self.admit(step - 1, enter)
        return [row for place in sorted(self._groups) if place[0] == step for row in self._groups.pop(place)]

    def extend(self, step: int, groups: Iterable[int], enter: Enter) -> None:
        """Further prompts of a step, beside those of its `pace`."""
        self._groups |= {(step, group): enter(step, group) for group in groups}


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


class StreamWriter:
    """Lets prompts enter, and plays their episodes with the run's engine and environment. One that is over is durable,
    and is not played again."""

    def __init__(
        self,
        run: StepContext,
        index: int,
        rows: Sequence[Completion] = (),
        batches: Mapping[int, pa.Table] = MappingProxyType({}),
        draws: Draws | None = None,
    ) -> None:
        """`rows`: of the stream; `batches`: prompts by step, others are drawn, or asked of the source."""
        self._run = run
        self._index = index
        self._batches = {**batches}
        self._draws = draws
        self._player = EpisodePlayer.of(run.config, run.tokenizer, run.arch)
        self._sampling = replace(self._player.sampling(), report_experts=run.config.rollout.router_replay)
        self._shards = run.store.shards(index)
        # The stream writes into its own rows.
        copies = [replace(row, tokens=[*row.tokens], logprobs=[*row.logprobs]) for row in rows]
        # All of a completion, as it was stored or last played.
        self._rows = {_sample(row): row for row in copies if row.tokens and row.in_flight}
        # Of each part that this step asked for: tokens before it -> tokens after it.
        self._parts: dict[_Sample, dict[int, int]] = defaultdict(dict)
        table = self._shards.read()
        if table is not None:
            experts = routes(table["experts"]) if "experts" in table.column_names else [None] * len(table)
            for values, row_experts in zip(table.select(PLAYED_EPISODES.names).to_pylist(), experts, strict=True):
                parts = dict(values.pop("parts"))
                row = Completion.of_row(values, row_experts)
                self._rows[_sample(row)] = row
                self._parts[_sample(row)] = parts

    def enter(self, batch: int, group: int) -> list[Completion]:
        row = self._prompt(batch, group)
        config = self._run.config
        return [
            Completion(
                group,
                sample,
                prompt_id=row["prompt_id"],
                seed=sample_seed(config.seed, batch, group, sample),
                prompt_tokens=row["tokens"],
                batch=batch,
            )
            for sample in range(config.rollout.group_size)
        ]

    def prompts(self, batch: int) -> pa.Table:
        """Of kind `prompts`: all that a step has drawn."""
        config = self._run.config
        if self._draws is not None:
            draws = self._draws.of_step(batch)
            if batch not in self._batches or len(draws) > len(self._batches[batch]):
                self._batches[batch] = prompt_table(self._run, [self._draws.problem(draw) for draw in draws])
        elif batch not in self._batches:
            problems = self._run.source.training(batch, config.rollout.drawn_prompts, config.seed)
            self._batches[batch] = prompt_table(self._run, problems)
        return self._batches[batch]

    def __call__(self, groups: Sequence[PromptGroup], places: Sequence[GroupPlace]) -> Iterator[list[Completion]]:
        missing = list[PromptGroup]()
        over = {key for key, row in self._rows.items() if not row.in_flight}
        for group in groups:
            place = places[group.group]
            durable = {sample for sample in group.samples if (*place, sample) in over}
            yield [
                self._durable_part((*place, sample), group, i)
                for i, sample in enumerate(group.samples)
                if sample in durable
            ]
            if (missing_part := group.without(durable)).samples:
                missing.append(missing_part)
        if missing:
            yield from self._play(missing, places)

    def attach_turns(self, rows: Sequence[Completion]) -> None:
        """Give rows of the stream the turns and masks that go with their tokens."""
        for row in rows:
            written = len(row.tokens)
            if written and (whole := self._rows.get(_sample(row))) is not None:
                row.prompt_tokens = whole.prompt_tokens
                row.policy_mask = whole.part(0, written).policy_mask
                # Before a kill more of it may have been played than the stream has asked for since.
                turns = [turn for turn in whole.turns if turn.observation_end <= written]
                row.turns = turns if row.in_flight else whole.turns

    def has_more(self, rows: Sequence[Completion]) -> bool:
        """True if more of them is durable than the stream has."""
        present = (self._rows.get(_sample(row)) for row in rows if row.in_flight)
        return any(row is not None and not row.in_flight for row in present)

    def _prompt(self, batch: int, group: int) -> dict[str, Any]:
        row: dict[str, Any]
        (row,) = self.prompts(batch).slice(group, 1).to_pylist()
        return row

    def _durable_part(self, key: _Sample, group: PromptGroup, i: int) -> Completion:
        """Of a completion that is over, what is asked for now."""
        row = self._rows[key]
        before = len(group.prefix_of(i))
        end = self._parts[key].get(before, before + group.max_tokens_of(i, self._sampling.max_new_tokens))
        part = replace(row.part(before, end), group=group.group)
        return part if end >= len(row.tokens) else replace(part, finish="open")

    def _play(self, missing: Sequence[PromptGroup], places: Sequence[GroupPlace]) -> Iterator[list[Completion]]:
        run = self._run
        by_number = {self._number(places[group.group]): group for group in missing}
        groups = [replace(group, group=number) for number, group in by_number.items()]
        prompts = [{**self._prompt(*places[group.group]), "group": number} for number, group in by_number.items()]
        prefixes = {
            (number, sample): self._rows[key]
            for number, group in by_number.items()
            for sample in group.samples
            if (key := (*places[group.group], sample)) in self._rows
        }
        pool = pool_of(run, self._recorded_turns)
        counts_before = draft_counts(run.engine)
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
        counts = draft_counts(run.engine) - counts_before
        run.draft_counts.setdefault(self._index, Counter()).update(counts)

    def _next_parts(
        self, batch: Sequence[Completion], by_number: Mapping[int, PromptGroup], places: Sequence[GroupPlace]
    ) -> list[Completion]:
        parts = list[Completion]()
        over = list[Completion]()
        for one in batch:
            group = by_number[one.group]
            step, number = places[group.group]
            before = len(group.prefix_of(group.samples.index(one.sample)))
            whole = replace(one, batch=step, group=number)
            self._rows[_sample(whole)] = whole
            self._parts[_sample(whole)][before] = len(one.tokens)
            parts.append(replace(one.part(before), group=group.group))
            if not one.in_flight:
                self._run.reply_seconds.setdefault(self._index, []).extend(turn.seconds for turn in one.turns)
                over.append(whole)
        if over:
            self._store(over)
        return parts

    def _store(self, over: Sequence[Completion]) -> None:
        rows = [{**row.row(), "parts": [*self._parts[_sample(row)].items()]} for row in over]
        self._shards.append(with_experts(pa.Table.from_pylist(rows, schema=PLAYED_EPISODES), over))
        # The verifier may begin while others are generated. A replay has the judgements of its own step alone.
        batches = {row.batch for row in over} if self._run.replayed is None else {self._index}
        for batch in sorted(batches):
            rows_of_batch = [row for row in over if row.batch == batch]
            prompts = [self._prompt(batch, group) for group in sorted({row.group for row in rows_of_batch})]
            ends = ends_of(prompts, *row_tables(rows_of_batch, self._run.config, self._run.tokenizer))
            begin_verdicts(self._run, batch, ends)

    def _number(self, place: GroupPlace) -> int:
        batch, group = place
        return _FIRST_NUMBER + (batch - 1) * self._run.config.rollout.most_prompts + group

    def _recorded_turns(self) -> dict[Key, list[TurnRecord]]:
        assert self._run.replayed is not None, "only a replay has no environment"
        store = self._run.store
        artifacts = self._run.replayed.artifacts(self._index)
        finished = turn_records(store.get_table(artifacts[self._run.graph.artifact_of("turns")]))
        recorded = {(self._number((self._index, group)), sample): turns for (group, sample), turns in finished.items()}
        others = [artifacts[name] for name in ("dropped", self._run.graph.carries.get("stream")) if name in artifacts]
        for row in (row for ref in others for row in stream_rows(store.get_table(ref))):
            if row.turns:
                recorded[self._number((row.batch, row.group)), row.sample] = row.turns
        return recorded


def open_stream(run: StepContext, stream: Ref, newest: int) -> Stream:
    pipeline = run.config.pipeline
    prompts = run.config.rollout.drawn_prompts
    # One step ahead, episodes are played to their end: those of the next step enter when all of this step are over.
    whole = run.config.environment is not None and pipeline.mode == "one_step_off"
    most = prompts if whole else pipeline.max_inflight_prompts
    pace = StreamLimits(prompts, pipeline.max_staleness, most)
    return Stream(stream_rows(run.store.get_table(stream)), pace, newest)


def chunk_together(config: RunConfig) -> int | None:
    """Tokens that completions of later steps write at a time beside those of this step; None: they wait."""
    # No episode can be cut where the longest one of others ends.
    together = config.pipeline.mode == "asynchronous" and config.environment is None
    return config.pipeline.chunk_tokens if together else None


def complete_step(run: StepContext, index: int, stream: Stream, writer: StreamWriter) -> list[Completion]:
    """The completions of a step, with the turns of their episodes."""
    rows = stream.complete(index, chunk_together(run.config), writer, writer.enter)
    writer.attach_turns([*rows, *stream.rows])
    return rows


def table_in_flight(run: StepContext, rows: Sequence[Completion]) -> pa.Table:
    return stream_table(rows, STREAM if run.config.environment is None else STREAM_OF_EPISODES)


def stream_rows(table: pa.Table) -> list[Completion]:
    return [Completion.of_row(row) for row in table.to_pylist()]


def stream_table(rows: Iterable[Completion], schema: pa.Schema) -> pa.Table:
    return pa.Table.from_pylist([row.row() for row in rows], schema=schema)


def _sample(row: Completion) -> _Sample:
    return row.batch, row.group, row.sample
