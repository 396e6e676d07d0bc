"""The accuracy of the policy on held-out prompts: the content of artifacts of kind `evaluation`."""

from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import groupby
from operator import itemgetter
from typing import Any

import pyarrow as pa

from fp8core.environments.pool import Pool
from fp8core.environments.protocol import TurnRecord
from fp8core.metrics.episodes import episode_means
from fp8core.metrics.reward import means_by_source
from fp8core.progress import Progress, tell_progress
from fp8core.rewards.scorer import OUTCOMES, Key
from fp8core.rollout.engine import Completion, RolloutEngine
from fp8core.rollout.episodes import EpisodePlayer
from fp8core.run.context import StepContext
from fp8core.run.rollouts import (
    check_outcomes,
    ends_of,
    groups_of,
    judgement_table,
    pool_of,
    prompt_table,
    recall_judgements,
    row_tables,
    tell_failures,
    turn_records,
    verdicts_of,
)
from fp8core.store.artifacts import Ref
from fp8core.store.ledger import START
from fp8core.store.tables import HELDOUT_SAMPLES, SAMPLE_CHARACTERS, SOURCE


def while_going(run: StepContext, batches: Generator[list[Completion], None, None]) -> Iterator[list[Completion]]:
    """Episodes as they finish, until another task of the step fails."""
    # The error holds this frame: open episodes would stay with the environment.
    with closing(batches):
        for batch in batches:
            if batch:
                yield batch
            run.check_halted()


def all_of(batches: Iterable[list[Completion]], count: int, progress: Progress = tell_progress) -> list[Completion]:
    episodes = list[Completion]()
    progress(0, count)
    for batch in batches:
        episodes += batch
        progress(len(episodes), count)
    return sorted(episodes, key=lambda one: one.key)


def heldout_artifacts(run: StepContext, index: int) -> dict[str, Ref]:
    def read_turns() -> dict[Key, list[TurnRecord]]:
        assert run.replayed is not None, "only a replay has no environment"
        # A pipeline may rename what its steps provide; the first evaluation is before them.
        name = "heldout_turns" if index == START else run.graph.artifact_of("heldout_turns")
        return turn_records(run.store.get_table(run.replayed.artifacts(index)[name]))

    pool = pool_of(run, read_turns)
    return stored_evaluation(run, *heldout_accuracy(run, index, run.engine, run.config.evaluation.prompts, pool))


def stored_evaluation(
    run: StepContext, content: dict[str, Any], turns: pa.Table | None, judgements: pa.Table | None
) -> dict[str, Ref]:
    store = run.store
    tables = {"heldout_turns": ("turns", turns), "heldout_judgements": ("judgements", judgements)}
    artifacts = {port: store.put_table(kind, table) for port, (kind, table) in tables.items() if table is not None}
    return {**artifacts, "evaluation": store.put_json("evaluation", content)}


def heldout_accuracy(
    run: StepContext, index: int, engine: RolloutEngine, count: int, pool: Pool | None = None
) -> tuple[dict[str, Any], pa.Table | None, pa.Table | None]:
    """The content of an artifact of kind `evaluation` for the first held-out prompts, their turns and judgements."""
    prompts = prompt_table(run, run.source.heldout(run.config.evaluation.prompts)[:count])
    rows = prompts.to_pylist()
    groups = groups_of(rows, run.config.seed, START, 1)
    player = EpisodePlayer.of(run.config, run.tokenizer, run.arch)
    batches = player.play(engine, groups, rows, player.evaluation_sampling(0.0), pool)
    episodes = all_of(while_going(run, batches), len(groups))
    rollouts, turns = row_tables(episodes, run.config, run.tokenizer)
    check_outcomes(run.config, turns)
    recall_judgements(run, index)
    verdicts = verdicts_of(run.verifier.main, ends_of(rows, rollouts, turns))
    tell_failures(run, "held-out prompts", verdicts)
    outcomes = Counter(verdict.outcome for verdict in verdicts)
    texts = rollouts["text"].to_pylist()
    content = {
        "accuracy": sum(verdict.score for verdict in verdicts) / len(verdicts),
        "prompts": len(verdicts),
        "length_mean": sum(one.length for one in episodes) / len(episodes),
        "outcomes": {name: outcomes[name] for name in OUTCOMES},
        "scores": {row["prompt_id"]: verdict.score for row, verdict in zip(rows, verdicts, strict=True)},
        "samples": [
            {
                "prompt_id": rows[i]["prompt_id"],
                "prompt": rows[i]["text"][-SAMPLE_CHARACTERS:],
                "text": texts[i][:SAMPLE_CHARACTERS],
                "length": len(episodes[i].tokens),
                "score": verdicts[i].score,
            }
            for i in range(min(HELDOUT_SAMPLES, len(rows)))
        ],
    }
    if SOURCE.name in prompts.column_names:
        scores = [verdict.score for verdict in verdicts]
        columns: dict[str, Sequence[float]] = {"accuracy": scores, "length_mean": [one.length for one in episodes]}
        content["sources"] = means_by_source(prompts[SOURCE.name].to_pylist(), columns)
    if turns is not None:
        by_episode = groupby(turns.to_pylist(), key=itemgetter("group"))
        content["episodes"] = episode_means([[*rows] for _, rows in by_episode])
    return content, turns, judgement_table(run.config, verdicts)
