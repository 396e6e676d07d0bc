"""The `fp8-grpo` command: one module a command, named as the command, and all of them in `flows.cli.commands`.

Exit codes: 0 done; 1 the training failed, or a stored file is damaged; 2 the user's mistake, found before any work.
A stop has one of its own: 3 paused by a bound of `alignment.stop`; 130 Ctrl-C, at once; 143 SIGTERM, after the current
step.
"""

from collections.abc import Sequence

# Nothing large: until Ctrl-C is handled below, it prints a traceback.
from flows.termination import keep_interrupt, leave


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; mistakes of the user are one line on stderr."""
    with keep_interrupt(leave("interrupted")):
        from flows.cli.commands import call
    return call(arguments)
