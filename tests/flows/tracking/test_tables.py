"""The tables of a training in MLflow."""

import io
from pathlib import Path
from typing import Any

from flows.tracking.tables import COMPLETION_COLUMNS, completion_table
from fp8core.config.load import load_config
from fp8core.report.console import Console
from fp8core.run.checks.settings import graph_of
from fp8core.run.loop import train
from fp8core.run.open import open_directory, open_run


def test_advantages_are_shown_wherever_old_log_probs_come_from(small: dict[str, Any], tmp_path: Path) -> None:
    verifier = tmp_path / "verifier.py"
    verifier.write_text("def score(prompt, completion, reference, finish): return sum(completion.encode()) % 2 > 0\n")
    settings = {**small, "reward.verifier": f"{verifier}:score", "correction.method": "token_tis", "steps": 1}
    shown = {}
    for source in ("pass", "training", "rollout"):
        config = load_config("tiny", {**settings, "logprobs.source": source, "runs": str(tmp_path / "runs")})
        console = Console(io.StringIO(), 1)
        with open_directory(config, source) as directory, open_run(config, graph_of(config), directory, console) as run:
            train(run)
            table = completion_table(run)
        assert table is not None
        shown[source] = [row[COMPLETION_COLUMNS.index("advantage")] for row in table[1]]
    assert any(shown["pass"])
    assert shown["training"] == shown["rollout"] == shown["pass"]
