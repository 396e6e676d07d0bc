"""Replies of judges as artifacts of the step that asked: whoever makes it again takes them from there."""

from collections.abc import Sequence

import pyarrow as pa

from fp8core.config.run import RunConfig
from fp8core.rewards.scorer import Judgement, Verdict
from fp8core.run.context import StepContext
from fp8core.store.tables import JUDGEMENTS


def judgement_table(config: RunConfig, verdicts: Sequence[Verdict]) -> pa.Table | None:
    """None without a judge. Equal requests have one reply."""
    if "judge" not in config.features:
        return None
    rows = {each.request: each._asdict() for verdict in verdicts for each in verdict.judgements}
    return pa.Table.from_pylist([rows[request] for request in sorted(rows)], schema=JUDGEMENTS)


def stored_judgements(run: StepContext, index: int) -> list[Judgement]:
    """Those of a step that was made already, here or in the run that is replayed."""
    refs = [ref for ref in (run.replayed or run.ledger).artifacts(index).values() if ref.kind == "judgements"]
    # What is damaged is asked again.
    tables = [run.store.get_table(ref) for ref in refs if run.replayed is not None or run.store.is_intact(ref)]
    return [Judgement(**row) for table in tables for row in table.to_pylist()]


def recall_judgements(run: StepContext, index: int) -> None:
    run.answers.recall(stored_judgements(run, index))
