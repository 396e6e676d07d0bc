"""Tables of completions: samples of a step, and whole groups early and late."""

from flows.tracking.tracker import Table
from fp8core.report.completions import Row, largest_difference, pick_completions
from fp8core.report.run_data import compared_artifacts
from fp8core.run.context import RunContext
from fp8core.store.ledger import START
from fp8core.store.run_view import RunView
from fp8core.store.tables import key_of

SAMPLED_KINDS = ("prompts", "rollouts", "rewards")
SAMPLE_COLUMNS = ("step", "prompt", "completion", "reference", "reward", "outcome")
# As wide as MLflow shows them, the first six fit beside its list of files.
COMPLETION_COLUMNS = (
    *("prompt", "completion", "reward", "advantage", "mismatch", "step", "group", "sample"),
    *("outcome", "detail"),
)


def samples_due(run: RunContext, index: int) -> bool:
    """True in the first step, every `tracking.sample_every` and the last, where gc has left the completions."""
    chosen = index in (START + 1, run.config.steps) or index % run.config.tracking.sample_every == 0
    if index == START or not chosen or not run.config.tracking.sample_completions:
        return False
    store = run.directory.store
    kinds = {ref.kind for ref in run.directory.ledger.artifacts(index).values() if store.path(ref).exists()}
    return kinds.issuperset(SAMPLED_KINDS)


def sample_table(run: RunContext, index: int) -> Table:
    """The first completion of each of the first `tracking.sample_completions` prompts."""
    by_kind = {ref.kind: ref for ref in run.directory.ledger.artifacts(index).values()}
    store = run.directory.store
    # Only these columns become Python objects: a step's tokens are millions.
    prompts = store.get_table(by_kind["prompts"], ["group", "text", "reference"]).to_pylist()
    rollouts = store.get_table(by_kind["rollouts"], ["group", "sample", "text"]).to_pylist()
    rewards = store.get_table(by_kind["rewards"], ["reward", "outcome"]).to_pylist()
    asked = {row["group"]: (row["text"], row["reference"]) for row in prompts}
    rows = []
    for completion, verdict in zip(rollouts, rewards, strict=True):
        if completion["sample"] == 0:
            prompt, reference = asked[completion["group"]]
            rows.append((index, prompt, completion["text"], reference, verdict["reward"], verdict["outcome"]))
    return Table(SAMPLE_COLUMNS, rows[: run.config.tracking.sample_completions])


def completion_groups(run: RunContext) -> Table | None:
    """Whole groups of the prompts that the report shows, early and late; None where no step has its completions.

    `mismatch` is the largest |log p - log g| of a token, None for a completion that was not compared. A step that gc
    thinned out, or that another task trained, has no advantages.
    """
    view = RunView.read(run.directory.path)
    # The report names the unreadable files.
    picked = pick_completions(view, compared_artifacts(view), [])
    if picked is None:
        return None
    rows = [row for group in picked.in_order() for row in group]
    prompts = {step: _prompts(run, step) for step in {row["step"] for row in rows}}
    return Table(COMPLETION_COLUMNS, [_cells(row, prompts[row["step"]]) for row in rows])


def _cells(row: Row, prompts: dict[str, str]) -> tuple[object, ...]:
    numbers = (row["reward"], row["advantage"], largest_difference(row))
    shown = (None if number is None else float(f"{number:.4g}") for number in numbers)
    prompt = prompts.get(row["prompt_id"], row["prompt_id"])
    return prompt, row["text"], *shown, row["step"], *key_of(row), row["outcome"], row["detail"]


def _prompts(run: RunContext, index: int) -> dict[str, str]:
    found = [ref for ref in run.directory.ledger.artifacts(index).values() if ref.kind == "prompts"]
    store = run.directory.store
    tables = [store.get_table(ref, ["prompt_id", "text"]).to_pylist() for ref in found if store.path(ref).exists()]
    return {row["prompt_id"]: row["text"] for rows in tables for row in rows}
