"""The `fp8-grpo` command: its commands by subject, and all of them in `flows.cli.commands`."""

import sys
from collections.abc import Sequence

# Nothing large: until Ctrl-C is handled below, it prints a traceback.
from flows.termination import ExitCode


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        from flows.cli.commands import call
    except KeyboardInterrupt:
        sys.stderr.write("fp8-grpo: interrupted\n")
        return ExitCode.INTERRUPTED
    return call(arguments)
