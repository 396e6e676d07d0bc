"""What the main job must show: it learns, in exact FP8, within its overhead."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8core.run.commit import stored_metrics
from fp8core.store.artifacts import ArtifactStore
from fp8core.store.ledger import LedgerView

BIN = Path(sys.executable).parent
STORED = Path(__file__).parents[2] / "benchmarks" / "results" / "tiny_runs.json"


@pytest.fixture(scope="module")
def workplace(prefect_home: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("learning")
    prefect_home(folder / "prefect")
    return folder


def run_tiny(workplace: Path, name: str, *settings: str, config: str = "tiny") -> dict[str, Any]:
    """`fp8-grpo run`, in a folder where the runs share their warm starts."""
    summary = workplace / f"{name}.json"
    flags = [flag for setting in (f"run={name}", *settings) for flag in ("--set", setting)]
    environment = {
        **os.environ,
        "PREFECT_HOME": str(workplace / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    }
    finished = subprocess.run(
        [str(BIN / "fp8-grpo"), "run", config, *flags, "--json", str(summary)],
        cwd=workplace,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stderr == ""
    content: dict[str, Any] = json.loads(summary.read_text())
    print(name, json.dumps(content))
    return content


# An easier task, and updates large enough that twelve of them show; the demo below learns as it is shipped.
SHORT = (
    *("data.chain={min_operands: 4, max_operands: 4}", "warm_start.steps=700", "warm_start.batch_size=32"),
    *("steps=12", "evaluation.every=12", "rollout.prompts_per_step=16"),
    *("training.learning_rate=4e-4", "training.warmup_steps=2"),
)


def test_it_learns_in_exact_fp8_within_twelve_steps(workplace: Path) -> None:
    """Of 256 held-out prompts far more are right than before: seeds 0 to 2 gain 0.11 to 0.25; a wrong sign loses."""
    summary = run_tiny(workplace, "short", *SHORT)
    assert 0.20 <= summary["heldout_first"] <= 0.60
    assert summary["heldout_last"] >= summary["heldout_first"] + 0.10
    assert summary["tmpe_max"] == 1.0
    assert summary["tokens_differing"] == 0


@pytest.mark.slow
def test_a_mixture_of_experts_learns_in_exact_fp8_within_twelve_steps(workplace: Path) -> None:
    """Seed 0 gains 0.39."""
    summary = run_tiny(workplace, "moe", *SHORT, config="tiny-moe")
    assert 0.20 <= summary["heldout_first"] <= 0.60
    assert summary["heldout_last"] >= summary["heldout_first"] + 0.20
    assert summary["tmpe_max"] == 1.0
    assert summary["tokens_differing"] == 0


@pytest.mark.slow
def test_the_demo_learns_in_exact_fp8(workplace: Path) -> None:
    """In 20 of its 80 steps, which are those of the whole: no setting depends on their number. It ends at 1.00."""
    summary = run_tiny(workplace, "demo", "steps=20")
    assert summary["steps"] == 20
    assert summary["reward_last10"] >= 0.70
    assert 0.30 <= summary["heldout_first"] <= 0.60
    assert summary["heldout_last"] >= 0.95
    assert summary["tmpe_max"] == 1.0
    assert summary["tokens_differing"] == 0


@pytest.mark.slow
def test_the_demo_learns_from_tokens_of_older_policies(workplace: Path) -> None:
    """Two engines go on beside every update. After a quarter of the demo it ends at 1.00, as the synchronous one."""
    ahead = ("pipeline.mode=asynchronous", "pipeline.chunk_tokens=4", "cluster.engines=2")
    summary = run_tiny(workplace, "ahead", "steps=20", *ahead)
    assert 0.30 <= summary["heldout_first"] <= 0.60
    assert summary["heldout_last"] >= 0.95
    assert summary["tmpe_max"] == 1.0
    assert summary["tokens_differing"] == 0
    run = workplace / "runs" / "ahead"
    ledger, store = LedgerView.read(run / "ledger.jsonl"), ArtifactStore(run)
    ages = [stored_metrics(ledger, store, step)["rollout/staleness_max"] for step in range(1, 21)]
    assert max(ages) == 1
    places = store.get_json(ledger.steps()[20].manifest)["observed"]["cluster"]
    assert {"engine 0", "engine 1"} <= places.keys()


@pytest.mark.slow
def test_a_policy_learns_to_hand_its_arithmetic_to_the_tool(workplace: Path) -> None:
    """Three operands instead of five. It ends at 1.00."""
    shorter = ("data.chain={min_operands: 3, max_operands: 3}", "warm_start.steps=500", "warm_start.batch_size=32")
    summary = run_tiny(workplace, "tools", *shorter, "steps=8", "evaluation.every=8", config="tiny-tools")
    assert summary["heldout_first"] <= 0.5
    assert summary["heldout_last"] >= 0.95
    assert summary["tmpe_max"] == 1.0
    assert summary["tokens_differing"] == 0
    run = workplace / "runs" / "tools"
    ledger, store = LedgerView.read(run / "ledger.jsonl"), ArtifactStore(run)
    last = stored_metrics(ledger, store, summary["steps"])
    assert last["environment/heldout_tool_calls"] >= 0.95
    assert last["environment/tool_errors"] <= 0.05


@pytest.mark.alone
def test_orchestration_takes_little_of_a_step(workplace: Path) -> None:
    """The bounds hold at the speed of the stored run; one of three shows them on a host that does other things too."""
    stored = next(row for row in json.loads(STORED.read_text()) if row["name"] == "tiny, seed 0")
    shares = []
    while not any(median <= 60 and mean <= 150 for median, mean in shares):
        assert len(shares) < 3, shares
        found = run_tiny(workplace, f"overhead{len(shares)}", "steps=12", "warm_start.steps=3")
        # A shared host may be at half its speed for hours.
        slower = max(1.0, train_seconds(found) / train_seconds(stored))
        overhead = found["overhead_ms_per_step"]
        shares.append((overhead["median"] / slower, overhead["mean"] / slower))


def train_seconds(summary: dict[str, Any]) -> float:
    """Of a step."""
    seconds: float = summary["seconds"]["train"]
    return seconds / summary["steps"]
