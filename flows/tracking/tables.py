"""The tables of an MLflow run: samples and artifacts of a step, and whole groups of completions early and late."""

from flows.tracking.tracker import Table
from fp8core.report.completions import (
    Row,
    heldout_pairs,
    largest_difference,
    pick_completions,
    said_text,
    turn_mismatch,
)
from fp8core.report.run_data import compared_artifacts
from fp8core.run.context import RunContext
from fp8core.store.deletion_log import read_deletions
from fp8core.store.ledger import START
from fp8core.store.run_view import RunView
from fp8core.store.tables import key_of

SAMPLED_KINDS = ("prompts", "rollouts", "rewards")
SAMPLE_COLUMNS = ("step", "prompt", "completion", "reference", "reward", "outcome")
ARTIFACT_COLUMNS = ("step", "task", "artifact", "kind", "digest", "bytes", "path")
# As wide as MLflow shows them, the first six fit beside its list of files.
COMPLETION_COLUMNS = (
    *("prompt", "completion", "reward", "advantage", "mismatch", "step", "group", "sample"),
    *("outcome", "detail"),
)
HELDOUT_COLUMNS = (
    *("prompt", "first", "first_reward", "last", "last_reward"),
    *("first_length", "last_length", "first_step", "last_step"),
)


def sample_table(run: RunContext, index: int) -> Table:
    """The first completion of each of the first `tracking.sample_completions` prompts."""
    by_kind = {ref.kind: ref for ref in run.directory.ledger.artifacts(index).values()}
    store = run.directory.store
    # Only these columns become Python objects: a step's tokens are millions.
    prompts = store.get_table(by_kind["prompts"], ["group", "text", "reference"]).to_pylist()
    rollouts = store.get_table(by_kind["rollouts"], ["group", "sample", "text"])
    rewards = store.get_table(by_kind["rewards"], ["reward", "outcome"])
    asked = {row["group"]: row for row in prompts}
    rows = [
        (
            index,
            asked[completion["group"]]["text"],
            completion["text"],
            asked[completion["group"]]["reference"],
            verdict["reward"],
            verdict["outcome"],
        )
        for completion, verdict in zip(rollouts.to_pylist(), rewards.to_pylist(), strict=True)
        if completion["sample"] == 0
    ]
    return SAMPLE_COLUMNS, rows[: run.config.tracking.sample_completions]


def artifact_table(run: RunContext, index: int) -> Table:
    root = run.directory.path
    rows = [
        (index, task, name, ref.kind, ref.digest, ref.size, str(root / ref.uri))
        for task, entry in run.directory.ledger.tasks(index).items()
        for name, ref in entry.outputs.items()
    ]
    return ARTIFACT_COLUMNS, rows


def tables_due(run: RunContext, index: int) -> bool:
    """The first step, every `tracking.sample_every`, and the last."""
    chosen = index == START + 1 or index % run.config.tracking.sample_every == 0 or index == run.config.steps
    return index > START and chosen


def samples_due(run: RunContext, index: int) -> bool:
    """True if completions of a step are to be shown, and `fp8-grpo gc` has left them."""
    if not (tables_due(run, index) and run.config.tracking.sample_completions):
        return False
    sampled = [ref for ref in run.directory.ledger.artifacts(index).values() if ref.kind in SAMPLED_KINDS]
    if not {ref.kind for ref in sampled}.issuperset(SAMPLED_KINDS):
        return False  # The pipeline has no such step.
    missing = [ref for ref in sampled if not run.directory.store.path(ref).exists()]
    return not missing or not read_deletions(run.directory.path).keys() & {ref.digest for ref in missing}


def published_kinds(run: RunContext, index: int) -> set[str]:
    return {"metrics", *(SAMPLED_KINDS if samples_due(run, index) else ())}


def completion_table(run: RunContext) -> Table | None:
    """Whole groups of the prompts that the report shows, early and late; None where no step has its completions.

    `mismatch` is the largest |log p - log g| of a token, None for a completion that was not compared. A step that gc
    thinned out, or that an earlier version or another task trained, has no advantages.
    """
    view = RunView.read(run.directory.path)
    # The report names the unreadable files.
    picked = pick_completions(view, compared_artifacts(view), [])
    if picked is None:
        return None
    groups = picked.in_order()
    steps = {rows[0]["step"] for rows in groups}
    prompts = {step: _prompts(run, step) for step in steps}

    def cells(row: Row) -> tuple[object, ...]:
        step, key = row["step"], key_of(row)
        prompt = prompts[step].get(row["prompt_id"], row["prompt_id"])
        numbers = (row["reward"], row["advantage"], largest_difference(row))
        shown = (None if number is None else _short(number) for number in numbers)
        return prompt, row["text"], *shown, step, *key, row["outcome"], row["detail"]

    return COMPLETION_COLUMNS, [cells(row) for rows in groups for row in rows]


def episode_turns(run: RunContext) -> dict[tuple[int, int, int], list[Row]]:
    """Turns of the episodes in the table of completions, by step, group and sample; none without an environment.

    Each has the largest |log p - log g| of its tokens, and how many differ, as `mismatch` and `differing`. Both are
    None where it was not compared.
    """
    if run.config.environment is None:
        return {}
    view = RunView.read(run.directory.path)
    picked = pick_completions(view, compared_artifacts(view), [])
    rows = [] if picked is None else [row for rows in picked.in_order() for row in rows]
    found = {}
    for row in rows:
        told = [(turn, turn_mismatch(row, turn) or (None, None)) for turn in row["turns"]]
        found[row["step"], *key_of(row)] = [
            {**turn, "mismatch": by[0], "differing": by[1], "said": said_text(turn)} for turn, by in told
        ]
    return found


def heldout_table(run: RunContext) -> Table | None:
    """Held-out prompts with their completions at the first and at the last evaluation; None where none are kept."""
    rows = [
        (
            *(pair.first.prompt, pair.first.text, _short(pair.first.score), pair.last.text, _short(pair.last.score)),
            *(pair.first.length, pair.last.length, *pair.steps),
        )
        for pair in heldout_pairs(RunView.read(run.directory.path), [])
    ]
    return (HELDOUT_COLUMNS, rows) if rows else None


def _short(number: float) -> float:
    return float(f"{number:.4g}")


def _prompts(run: RunContext, index: int) -> dict[str, str]:
    found = [ref for ref in run.directory.ledger.artifacts(index).values() if ref.kind == "prompts"]
    store = run.directory.store
    tables = [store.get_table(ref, ["prompt_id", "text"]).to_pylist() for ref in found if store.path(ref).exists()]
    return {row["prompt_id"]: row["text"] for rows in tables for row in rows}
