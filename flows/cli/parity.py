"""`fp8-grpo parity`: run the parity flow in this process, with a Prefect server of its own where none is set."""

import argparse
import re
import signal
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flows.cli.arguments import numbers
from flows.environment import prepare_prefect, search_last
from flows.launch import exit_with, explain, say
from flows.termination import ExitCode
from fp8core.config.run import RUN_NAME


def add_commands(commands: Any) -> None:
    parser = commands.add_parser("parity", help="train in BF16 and in FP8, and judge whether FP8 learns the same")
    parser.add_argument(
        "config", nargs="?", metavar="CONFIG", help="a shipped configuration or a YAML file (default: tiny-nightly)"
    )
    parser.add_argument("--name", type=_name, help="name of the parity run; an existing one is continued")
    seeds = numbers(0, 2**31 - 1, 100)
    parser.add_argument("--seeds", type=seeds, metavar="N[,N]", help="seeds of every variant (default: as configured)")
    help_ = "what to train (default: all)"
    parser.add_argument("--variant", action="append", dest="variants", metavar="NAME", help=help_)
    parser.add_argument("--set", action="append", dest="overrides", metavar="KEY=VALUE", help="override a setting")
    parser.set_defaults(command=run_parity)


def run_parity(options: argparse.Namespace) -> int:
    """Run the flow; returns the exit code: 0 for PASS, 1 for FAIL, 4 for NOT ENOUGH DATA. Raises UserError."""
    from flows.parity_plan import refuse  # Imports torch.

    search_last(Path.cwd())
    names = ("config", "name", "seeds", "variants", "overrides")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    # The flow does so too. Here no server, folder or verdict comes of a mistake, and Prefect stores no password.
    refuse(**{"config": "tiny-nightly", **given}, date=datetime.now(UTC).date().isoformat())
    prepare_prefect("flows.parity")
    # An exception, so that the training is closed and Prefect's server stops with us.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(exit_with("terminated", ExitCode.TERMINATED)))
    # Prefect reads its environment when it is imported, hence not before `prepare_prefect`.
    from flows.parity import parity
    from fp8core.parity import NOT_ENOUGH

    state: Any = parity(**given, return_state=True)
    if state.is_completed() or state.name == NOT_ENOUGH:
        say(f"fp8-grpo: {state.message}")
        return ExitCode.DONE if state.is_completed() else ExitCode.UNDECIDED
    explain(state)
    return ExitCode.FAILED


def _name(text: str) -> str:
    if len(text) > 80 or not re.fullmatch(RUN_NAME, text):
        raise argparse.ArgumentTypeError(f"expected up to 80 letters, digits, '.', '_' and '-', found {text!r}")
    return text
