"""Trainings as processes of their own, through the command that a user types."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[1]
_POLL_SECONDS = 0.2


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
    code = _wait(process, stop)
    if code is None:
        process.terminate()
        code = _wait(process, end)
    return _ended(process, code)


def run_till(command: Sequence[str], log: IO[bytes], reached: Callable[[], bool], end: float) -> int:
    """Run a training and kill it as soon as `reached` says so, at the latest at `end` (time.monotonic).

    For trainings of which only what is committed matters: nothing is written after that moment, no checkpoint either.

    Returns:
        its exit code; -9 when it was killed.
    """
    process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    while (code := process.poll()) is None and not reached() and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)
    return _ended(process, code)


def _ended(process: subprocess.Popen[bytes], code: int | None) -> int:
    if code != 0:
        # The processes of an engine outlive a training that could not say good-bye to them.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def _wait(process: subprocess.Popen[bytes], moment: float) -> int | None:
    try:
        return process.wait(max(0.0, moment - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None
