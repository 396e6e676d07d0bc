"""What the main job must show: it learns, in exact FP8, within its overhead."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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


slow = pytest.mark.slow
TOOLS = (*("data.chain={min_operands: 3, max_operands: 3}", "warm_start.steps=500"), "warm_start.batch_size=32")


@pytest.mark.parametrize(
    ("config", "settings", "gain"),
    [
        # Of 256 held-out prompts far more are right than before: seeds 0 to 2 gain 0.11 to 0.25; a wrong sign loses.
        ("tiny", SHORT, 0.10),
        pytest.param("tiny-moe", SHORT, 0.20, marks=slow),  # Seed 0 gains 0.39.
        pytest.param("tiny", ("steps=20",), 0.35, marks=slow),  # A quarter of the demo; it ends at 1.00.
        pytest.param("tiny-tools", (*TOOLS, "steps=8", "evaluation.every=8"), 0.45, marks=slow),  # It ends at 1.00.
    ],
)
def test_it_learns_in_exact_fp8(workplace: Path, config: str, settings: tuple[str, ...], gain: float) -> None:
    summary = run_tiny(workplace, f"{config}-{len(settings)}", *settings, config=config)
    assert summary["heldout_first"] <= 0.60
    assert summary["heldout_last"] >= summary["heldout_first"] + gain
    assert summary["tmpe_max"] == 1.0
    assert summary["tokens_differing"] == 0


@pytest.mark.alone
def test_orchestration_takes_little_of_a_step(workplace: Path) -> None:
    """The bounds hold at the speed of the stored run; one of three shows them on a host that does other things too.

    The first of the twelve steps waits for its page while the server is new, up to two seconds: hence the mean."""
    stored = next(row for row in json.loads(STORED.read_text()) if row["name"] == "tiny, seed 0")
    shares = []
    while not any(median <= 150 and mean <= 250 for median, mean in shares):
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
