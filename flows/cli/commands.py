"""All commands: their parser, and what every one of them makes of errors and of Ctrl-C."""

import argparse
import atexit
import errno
import os
import sys
from collections.abc import Sequence
from gc import freeze
from typing import NoReturn

from flows.cli import (
    bisect,
    compare,
    compile,
    config,
    convert,
    doctor,
    evaluate,
    export,
    gc,
    graph,
    parity,
    plan,
    quantise,
    replay,
    report,
    resume,
    run,
    up,
    verify,
)
from flows.cli.arguments import refuse_other_files
from flows.environment import disable_telemetry, leave_working_directory_out
from flows.launch import stopped
from flows.termination import ExitCode, keep_interrupt, leave_import
from fp8core.errors import StoredFileError, UserError

# In the order of the help.
_COMMANDS = (
    run,
    graph,
    config,
    compile,
    doctor,
    convert,
    quantise,
    bisect,
    evaluate,
    replay,
    export,
    resume,
    verify,
    compare,
    report,
    gc,
    parity,
    plan,
    up,
)


def call(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code. Mistakes of the user are one line on stderr."""
    leave_working_directory_out()
    disable_telemetry()
    # Otherwise Python would search all that is left for cycles, which takes seconds, and then end anyway.
    atexit.register(freeze)
    try:
        with keep_interrupt(leave_import) as interrupt:
            options = build_parser().parse_args(arguments)
            refuse_other_files(options)
            code = int(options.command(options))
            sys.stdout.flush()
            if code == ExitCode.DONE:
                interrupt.check()
            return code
    except StoredFileError as error:
        return stopped(str(error), ExitCode.FAILED)
    except UserError as error:
        return stopped(str(error), ExitCode.MISTAKE)
    except KeyboardInterrupt:
        return stopped("interrupted", ExitCode.INTERRUPTED)
    except BrokenPipeError:
        # The reader is gone (`| head`). Python flushes once more at exit, and needs an open file.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.UNREAD
    except OSError as error:
        # A path that nobody may enter, or with a name that is too long, wherever it is looked at first.
        if error.errno not in (errno.EACCES, errno.ENAMETOOLONG, errno.ELOOP) or error.filename is None:
            raise
        return stopped(f"{error.filename}: {error.strerror}", ExitCode.MISTAKE)


class _Parser(argparse.ArgumentParser):
    """Parser whose errors are one line, as those of all user mistakes are."""

    def error(self, message: str) -> NoReturn:
        self.exit(ExitCode.MISTAKE, f"{self.prog}: {message}\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = _Parser(prog="fp8-grpo", description="GRPO in block-wise FP8.")
    commands = parser.add_subparsers(metavar="COMMAND")
    for command in _COMMANDS:
        command.add_command(commands)

    def show_help(options: argparse.Namespace) -> int:
        parser.print_help(sys.stderr)
        return ExitCode.MISTAKE

    parser.set_defaults(command=show_help)
    return parser
