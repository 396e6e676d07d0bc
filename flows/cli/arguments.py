"""Arguments of several commands, with one syntax and one set of errors."""

import argparse
from collections.abc import Callable

from fp8core.durable import Output


def add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="a shipped configuration (tiny, gsm8k) or a YAML file")
    add_overrides(parser)


def add_overrides(parser: argparse.ArgumentParser, text: str = "override a setting") -> None:
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE", help=text)


def add_output(parser: argparse.ArgumentParser, option: str, text: str, default: str | None = None) -> None:
    """A file to write, as an `Output`; one that may not be written is refused before any work (UserError)."""
    parser.add_argument(option, type=lambda path: Output(option, path), default=default, metavar="FILE", help=text)


def add_trust(parser: argparse.ArgumentParser) -> None:
    """`--trust`, without which no code is imported that a run's own configuration names."""
    parser.add_argument("--trust", action="store_true", help="import steps, verifiers and others that run.json names")


def at_least(least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
    def count(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a number from {least}, found {text!r}")
        if int(text) > most:
            raise argparse.ArgumentTypeError(f"expected a number up to {most}, found {text!r}")
        return int(text)

    return count


def numbers(least: int, most: int, count: int) -> Callable[[str], list[int]]:
    """The type of an argument of up to `count` numbers with commas between them, each within bounds."""
    each = at_least(least, most)

    def several(text: str) -> list[int]:
        parts = text.split(",")
        if not all(part.isdecimal() for part in parts):
            raise argparse.ArgumentTypeError(f"expected numbers with commas between them, found {text!r}")
        if len(parts) > count:
            raise argparse.ArgumentTypeError(f"expected up to {count} numbers, found {len(parts)}")
        return [each(part) for part in parts]

    return several
