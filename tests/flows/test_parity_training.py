"""A training of a parity run in a process of its own: when it dies, the night is red, and what it did is there."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefect.settings import PREFECT_API_URL

from flows.parity import parity, train_apart
from fp8core.store.layout import LEDGER
from fp8core.store.ledger import LedgerView

# A step of the user's own, in the working directory: its process dies in step 2.
STEPS = """\
import os
import signal

from tasks import reward as ours
from tasks.step import step


@step(inputs=ours.reward.spec.inputs, outputs=ours.reward.spec.outputs)
def reward(run, index, options, prompts, rollouts):
    if index == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return ours.reward(run, index, options, prompts, rollouts)
"""


@pytest.mark.slow
def test_one_that_dies_makes_the_night_red(
    prefect_server: None,
    small: dict[str, Any],
    mlflow_store: Callable[[Path], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mlflow_store(tmp_path)
    (tmp_path / "apart_steps.py").write_text(STEPS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PREFECT_API_URL", PREFECT_API_URL.value())
    monkeypatch.setattr("flows.parity.train_one", lambda name, training: train_apart(name, training.parameters))
    replaced = {"reward": {"uses": "apart_steps:reward", "needs": ["prompts", "rollouts"]}}
    settings = {
        **small,
        "runs": str(tmp_path),
        "tracking.system_metrics": False,
        "pipeline.replace": replaced,
        "steps": 3,
    }
    night = parity("tiny", name="dies", seeds=[0], variants=["bf16"], overrides=settings, return_state=True)
    assert night.is_failed()
    assert "bf16: complete seed 0: its process ended with -9" in night.message
    assert LedgerView.read(tmp_path / "parity-dies-bf16-0" / LEDGER).last_step() == 1
