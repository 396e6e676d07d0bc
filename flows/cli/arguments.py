"""Arguments of several commands, with one syntax and one set of errors."""

import argparse
import math
from collections.abc import Callable
from functools import partial
from itertools import combinations
from pathlib import Path

from fp8core.errors import UserError
from fp8core.store.outputs import Kind, Output, refuse_in_run


def add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="a shipped configuration (tiny, gsm8k) or a YAML file")
    add_overrides(parser)


def add_overrides(parser: argparse.ArgumentParser, text: str = "override a setting") -> None:
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE", help=text)


def add_output(parser: argparse.ArgumentParser, option: str, kind: Kind, text: str, default: str | None = None) -> None:
    """A file to write, as an `Output`; one that may not be written is refused before any work (UserError)."""
    parser.add_argument(option, type=partial(_output, option, kind), default=default, metavar="FILE", help=text)


def add_force(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--force", action="store_true", help="replace a file even if this program did not write it")


def refuse_other_files(options: argparse.Namespace) -> None:
    """Raises UserError: two outputs are one file, or one would replace a file that this program did not write, and
    `--force` is not given."""
    outputs = [value for value in vars(options).values() if isinstance(value, Output)]
    for first, second in combinations(outputs, 2):
        if first.target == second.target:
            raise UserError(f"{first.named} and {second.named} are one file; name another for one of both")
    for output in outputs:
        if not options.force:
            output.refuse_other()


def add_target(parser: argparse.ArgumentParser) -> None:
    """`target`, a folder to be made; one in a run's folder is refused before any work (UserError)."""
    parser.add_argument("target", type=_target, metavar="TARGET", help="folder to be made")


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


def number_that(fits: Callable[[float], bool], expected: str) -> Callable[[str], float]:
    """The type of an argument of a number that fits, which errors call `expected`."""

    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not fits(value):
            raise argparse.ArgumentTypeError(f"expected {expected}, found {text!r}")
        return value

    return number


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


def _output(option: str, kind: Kind, text: str) -> Output:
    output = Output(option, text, kind)
    output.refuse_place()
    return output


def _target(text: str) -> Path:
    refuse_in_run(text, Path(text))
    return Path(text)
