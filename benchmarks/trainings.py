"""Trainings as processes of their own, through the command that a user types."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[1]


def training_command(config: str, settings: Sequence[str]) -> list[str]:
    """`fp8-grpo run` of this interpreter, to be started in ROOT; settings are `key=value`."""
    flags = [flag for setting in settings for flag in ("--set", setting)]
    return [sys.executable, "-m", "flows.cli", "run", config, *flags]


def run_until(command: Sequence[str], log: IO[bytes], stop: float, end: float) -> int:
    """Run a training, ask it to stop after its step at the moment `stop`, and end it at `end` (time.monotonic).

    Returns:
        its exit code; 143 when it stopped after a step, -9 when it was ended.
    """
    process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        return process.wait(max(0.0, stop - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.terminate()
    try:
        return process.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with the processes of its engine and of Prefect
        return process.wait()
