"""All commands: their parser, and what every one of them makes of errors and of Ctrl-C."""

import argparse
import atexit
import os
import re
import sys
from collections.abc import Sequence
from gc import freeze
from importlib.metadata import version
from io import TextIOWrapper
from typing import NoReturn

from flows.cli import audit, configuration, doctor, export, measurement, training, up
from flows.environment import NO_TELEMETRY, leave_working_directory_out
from flows.launch import exit_with
from flows.termination import ExitCode
from fp8core.config.section import suggestion
from fp8core.errors import StoredFileError, UserError
from fp8core.processes.variables import set_variables

# In the order of the help.
_SUBJECTS = (training, configuration, doctor, export, measurement, audit, up)


def call(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code. Mistakes of the user are one line on stderr."""
    leave_working_directory_out()
    set_variables({}, NO_TELEMETRY)
    if isinstance(sys.stdout, TextIOWrapper):
        # Print `\u0416` for a character that its encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    # Otherwise Python would search all that is left for cycles, which takes seconds, and then end anyway.
    atexit.register(freeze)
    try:
        options = build_parser().parse_args(arguments)
        code = int(options.command(options))
        sys.stdout.flush()
        return code
    except StoredFileError as error:
        return exit_with(str(error), ExitCode.FAILED)
    except UserError as error:
        return exit_with(str(error), ExitCode.MISTAKE)
    except KeyboardInterrupt:
        return exit_with("interrupted", ExitCode.INTERRUPTED)
    except BrokenPipeError:
        # The reader is gone (`| head`). Python flushes standard output once more at exit, and needs an open file.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.UNREAD
    except OSError as error:
        # A path that nobody may enter, or with a name that is too long, wherever it is looked at first.
        if error.filename is None:
            raise
        return exit_with(f"{error.filename}: {error.strerror}", ExitCode.MISTAKE)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        choice = re.fullmatch(r"argument (\S+): invalid choice: '(.*)' \(choose from (.*)\)", message)
        if choice is not None:
            argument, word = choice.group(1, 2)
            hint = suggestion(word, re.findall(r"[\w-]+", choice[3]))
            message = f"argument {argument}: there is no {word!r}; {hint}"
        self.exit(ExitCode.MISTAKE, f"{self.prog}: {message}\n")


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="fp8-grpo", description="GRPO in block-wise FP8.")
    parser.add_argument("--version", action="version", version=f"fp8-grpo {version('fp8-grpo')}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for subject in _SUBJECTS:
        subject.add_commands(commands)
    return parser
