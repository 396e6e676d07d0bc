"""Arguments of several commands, with one syntax and one set of errors."""

import argparse
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from fp8core.errors import UserError


def add_config(parser: argparse.ArgumentParser) -> None:
    """A configuration and its overrides."""
    parser.add_argument("config", help="a shipped configuration (tiny, gsm8k) or a YAML file")
    add_overrides(parser)


def add_overrides(parser: argparse.ArgumentParser, text: str = "override a setting") -> None:
    """`--set KEY=VALUE`, any number of times, as `overrides`."""
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE", help=text)


def add_output(parser: argparse.ArgumentParser, option: str, text: str, default: str | None = None) -> None:
    """A file to write; one that cannot be written is refused before any work (UserError)."""
    parser.add_argument(option, type=partial(_writable, option), default=default, metavar="FILE", help=text)


def add_trust(parser: argparse.ArgumentParser) -> None:
    """`--trust`, without which no code is imported that a run's own configuration names."""
    parser.add_argument("--trust", action="store_true", help="import steps, verifiers and others that run.json names")


def at_least(least: int) -> Callable[[str], int]:
    """The type of an argument that counts something."""

    def count(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a number from {least}, found {text!r}")
        return int(text)

    return count


def _writable(option: str, text: str) -> Path:
    file = Path(text)
    place = file if file.exists() else file.parent
    if file.is_dir() or not file.parent.is_dir() or not os.access(place, os.W_OK):
        raise UserError(f"{option} {file}: cannot be written; name a file in a folder that exists")
    return file
