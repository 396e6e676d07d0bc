"""`fp8-grpo doctor`: what this machine can run."""

import argparse
from typing import Any

from flows.launch import say
from flows.termination import ExitCode


def add_commands(commands: Any) -> None:
    parser = commands.add_parser("doctor", help="say what this machine can run")
    text = "say, too, what a Ray cluster has: HOST:PORT of its head, or auto"
    parser.add_argument("--address", type=_address, metavar="ADDRESS", help=text)
    parser.set_defaults(command=doctor)


def doctor(options: argparse.Namespace) -> int:
    from fp8core.report.doctor import examine

    say(examine(options.address))
    return ExitCode.DONE


def _address(text: str) -> str:
    from pydantic import ValidationError

    from fp8core.config.cluster import ClusterConfig

    try:
        ClusterConfig(address=text)
    except ValidationError:
        raise argparse.ArgumentTypeError(f"expected auto or HOST:PORT, found {text!r}") from None
    return text
