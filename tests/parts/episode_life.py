"""One life of a run whose policy speaks with an environment, in a process that forks from a server with torch."""

import io
import json
import math
import multiprocessing
import os
import signal
from pathlib import Path

from fp8core.config.load import reload_config
from fp8core.environments.pool import EnvironmentPool
from fp8core.environments.protocol import Reply
from fp8core.report.console import Console
from fp8core.run.loop import train
from fp8core.run.open import open_directory, open_run
from fp8core.run.refusals import graph_of

_PRELOADED = ["fp8core.run.loop", "fp8core.run.open", "fp8core.environments.pool", "pandas", "torch._dynamo"]


def live(described: Path, runs: Path, after: int, till: Path | None) -> None:
    """Continue the run `killed` of a folder, and kill this process at an answer of an environment.

    Args:
        described: the `run.json` of a run with the same configuration.
        runs: the folder.
        after: it is the first one beyond so many.
        till: or it is the first one with which this file exists.
    """
    answers, replies = 0, EnvironmentPool.replies

    def last_replies(self: EnvironmentPool, wait: bool, most_seconds: float = math.inf) -> list[Reply]:
        nonlocal answers
        found = replies(self, wait, most_seconds)
        answers += len(found)
        if answers > after or (till is not None and till.exists()):
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    EnvironmentPool.replies = last_replies
    config = reload_config(json.loads(described.read_text())["config"], {"runs": str(runs)})
    with (
        open_directory(config, "killed") as directory,
        open_run(config, graph_of(config), directory, Console(io.StringIO(), config.steps)) as run,
    ):
        train(run)


def exit_code_of_life(described: Path, runs: Path, after: int = 10**9, till: Path | None = None) -> int | None:
    """How `live` with these arguments ends in a process of its own. It costs no import; its errors are captured."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    process = context.Process(target=live, args=(described, runs, after, till))
    process.start()
    try:
        process.join()
    finally:
        process.kill()
    return process.exitcode
