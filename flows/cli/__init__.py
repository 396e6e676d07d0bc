"""The `fp8-grpo` command: a module for each command, and all of them in `flows.cli.commands`."""

from collections.abc import Sequence

# Nothing large: until Ctrl-C is handled below, it prints a traceback.
from flows.termination import keep_interrupt, leave


def main(arguments: Sequence[str] | None = None) -> int:
    with keep_interrupt(leave("interrupted")):
        from flows.cli.commands import call
    return call(arguments)
