"""`fp8-grpo doctor`: what this machine can run."""

import argparse
from typing import Any

from flows.launch import say


def add_command(commands: Any) -> None:
    """Declare the command on the parser's subcommands."""
    commands.add_parser("doctor", help="say what this machine can run").set_defaults(command=doctor)


def doctor(options: argparse.Namespace) -> int:
    """Print what was found; returns the exit code."""
    from fp8core.report.doctor import examine

    say(examine())
    return 0
