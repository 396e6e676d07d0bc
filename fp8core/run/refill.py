"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): groups without a signal make way for others.

Each round draws as many prompts as groups are missing, so no group with a signal is dropped but for `oversample`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from fp8core.config.run import RunConfig
from fp8core.rewards.scorer import ScoreRequest, Verdict
from fp8core.rollout.engine import Completion
from fp8core.run import rollouts
from fp8core.run.batches import baseline_mask, rows_with_signal
from fp8core.run.context import StepContext
from fp8core.run.draws import Draws
from fp8core.run.stream import Stream, StreamWriter, complete_step, table_in_flight
from fp8core.store.artifacts import Ref
from fp8core.store.tables import VISITS


@dataclass
class Selection:
    """`rows` and `rewards` of the groups that a step learns from, completions of the others, and all its `visits`.

    `judgements`: None without a judge."""

    rows: list[Completion]
    rewards: pa.Table
    judgements: pa.Table | None
    dropped: list[Completion]
    visits: list[dict[str, Any]]

    @property
    def groups_with_signal(self) -> list[int]:
        return [visit["group"] for visit in self.visits if visit["signal"]]

    def choose(self, count: int) -> None:
        """Drop all groups but so many, the first with a signal before others; these leave the loss."""
        with_signal = self.groups_with_signal
        others = [visit["group"] for visit in self.visits if not visit["signal"]]
        chosen = {*[*with_signal, *others][:count]}
        for visit in self.visits:
            visit["dropped"] = visit["group"] not in chosen
        groups = self.rewards["group"]
        in_loss = pc.and_(self.rewards["keep"], pc.is_in(groups, pa.array(with_signal, groups.type)))
        rewards = self.rewards.set_column(self.rewards.schema.get_field_index("keep"), "keep", in_loss)
        self.rewards = rewards.filter(pc.is_in(groups, pa.array([*chosen], groups.type)))
        self.dropped = [row for row in self.rows if row.group not in chosen]
        self.rows = [row for row in self.rows if row.group in chosen]


def select(
    run: StepContext, index: int, first: list[Completion], stream: Stream, writer: StreamWriter, draws: Draws
) -> Selection:
    """`first`: the completions of the prompts that the step begins with. Raises UserError: no answer could be checked.

    At `max_batches` groups without a signal are among those that stay."""
    config = run.config
    refill = config.rollout.refill
    size = config.rollout.prompts_per_step
    rows = list[Completion]()
    ends = list[ScoreRequest | Verdict]()
    verdicts = list[Verdict]()
    rollouts.recall_judgements(run, index)
    answered = first
    while answered:
        rows += answered
        prompts = writer.prompts(index).drop_columns(["tokens"]).to_pylist()
        ends += rollouts.ends_of(prompts, *rollouts.row_tables(answered, config, run.tokenizer))
        verdicts += rollouts.verdicts_of(run.verifier, ends[len(verdicts) :])
        rollouts.failures(config, verdicts)
        # Equal requests of a later round have this reply, also where the commit of the step before let it go.
        run.answers.recall(judgement for verdict in verdicts for judgement in verdict.judgements)
        turn_rewards = [sum(turn.reward for turn in row.turns) for row in rows]
        rewards = rollouts.rewards_of(config, prompts, [row.key for row in rows], ends, verdicts, turn_rewards)
        visits = list(_visits(rows, rewards, draws.of_step(index), config))
        selection = Selection(rows, rewards, rollouts.judgement_table(config, verdicts), [], visits)
        missing = size - len(selection.groups_with_signal)
        count = 0 if refill is None else max(0, min(missing, config.rollout.most_prompts - len(visits)))
        draws.extend(index, count)
        stream.extend(index, range(len(visits), len(visits) + count), writer.enter)
        answered = complete_step(run, index, stream, writer)
    rollouts.tell_failures(run, "rewards", verdicts)
    if refill is not None:
        if missing > 0:
            run.console.note(
                f"step {index}: {size - missing} of {size} groups have a signal at "
                f"rollout.refill.max_batches={refill.max_batches}"
            )
        selection.choose(size)
    return selection


def stored_selection(run: StepContext, index: int, selection: Selection, draws: Draws) -> dict[str, Ref]:
    store = run.store
    draws.close_step(index, selection.visits)
    outputs = {
        "rewards": store.put_table("rewards", selection.rewards),
        "visits": store.put_table("visits", pa.Table.from_pylist(selection.visits, schema=VISITS)),
        "drawn": draws.stored(),
    }
    if selection.judgements is not None:
        outputs["judgements"] = store.put_table("judgements", selection.judgements)
    if run.config.rollout.refill is not None:
        outputs["dropped"] = store.put_table("dropped", table_in_flight(run, selection.dropped))
    return outputs


def _visits(
    rows: Sequence[Completion], rewards: pa.Table, draws: Sequence[int], config: RunConfig
) -> Iterator[dict[str, Any]]:
    signal = rows_with_signal(rewards, baseline_mask(rewards, config)).tolist()
    completions = zip(rows, rewards.to_pylist(), signal, strict=True)
    for group, members in groupby(completions, key=lambda completion: completion[0].group):
        group_rows, group_rewards, differs = zip(*members, strict=True)
        outcomes = {reward["outcome"] for reward in group_rewards if reward["keep"]}
        yield {
            "group": group,
            "draw": draws[group],
            "prompt_id": group_rows[0].prompt_id,
            "tokens": sum(row.length for row in group_rows),
            "reward": sum(reward["reward"] for reward in group_rewards) / len(group_rewards),
            "right": outcomes == {"right"},
            "signal": any(differs),
            "dropped": False,
        }
