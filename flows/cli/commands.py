"""All commands: their parser, and what every one of them makes of errors and of Ctrl-C."""

import argparse
import atexit
import errno
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from gc import freeze
from importlib.metadata import version
from io import TextIOWrapper
from typing import NoReturn

from flows.cli import audit, bisect, checkpoint, configuration, doctor, evaluate, parity, report, training, up
from flows.environment import disable_telemetry, leave_working_directory_out
from flows.launch import stopped
from flows.termination import ExitCode
from fp8core.config.run import RunConfig
from fp8core.config.section import places_of, suggestion
from fp8core.errors import StoredFileError, UserError

# In the order of the help.
_SUBJECTS = (training, configuration, doctor, checkpoint, bisect, evaluate, audit, report, parity, up)


def call(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code. Mistakes of the user are one line on stderr."""
    leave_working_directory_out()
    disable_telemetry()
    if isinstance(sys.stdout, TextIOWrapper):
        # Print `\u0416` for a character that its encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    # Otherwise Python would search all that is left for cycles, which takes seconds, and then end anyway.
    atexit.register(freeze)
    try:
        options = _parsed(sys.argv[1:] if arguments is None else arguments)
        code = int(options.command(options))
        sys.stdout.flush()
        return code
    except StoredFileError as error:
        return stopped(str(error), ExitCode.FAILED)
    except UserError as error:
        return stopped(str(error), ExitCode.MISTAKE)
    except KeyboardInterrupt:
        return stopped("interrupted", ExitCode.INTERRUPTED)
    except BrokenPipeError:
        # The reader is gone (`| head`). Python flushes standard output once more at exit, and needs an open file.
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
        choice = re.fullmatch(r"argument (\S+): invalid choice: '(.*)' \(choose from (.*)\)", message)
        if choice is not None:
            argument, word = choice.group(1, 2)
            known = suggestion(word, re.findall(r"[\w-]+", choice[3]))
            message = f"argument {argument}: there is no {word!r}; {known}"
        self.exit(ExitCode.MISTAKE, f"{self.prog}: {message}\n")


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of a command; an argument that none takes is refused in one line, with `--set` for a setting."""
    parser = build_parser()
    options, others = parser.parse_known_args(arguments)
    if others:
        settings = [*_settings_meant(options, others)]
        hint = f"; did you mean {' or '.join(settings)}?" if settings else ""
        parser.error(f"unrecognized arguments: {' '.join(others)}{hint}")
    return options


def _settings_meant(options: argparse.Namespace, others: Sequence[str]) -> Iterator[str]:
    """The override that `--steps 6` stands for; `others` are the arguments that no option takes."""
    first, _, value = others[0].partition("=")
    if hasattr(options, "overrides") and first.startswith("--"):
        value = value or next((other for other in others[1:2] if not other.startswith("--")), "VALUE")
        word = first[2:].replace("-", "_")
        keys = [word] if word in RunConfig.model_fields else places_of(RunConfig, word)
        yield from (f"--set {shlex.quote(f'{key}={value}')}" for key in keys)


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="fp8-grpo", description="GRPO in block-wise FP8.")
    parser.add_argument("--version", action="version", version=f"fp8-grpo {version('fp8-grpo')}")
    commands = parser.add_subparsers(metavar="COMMAND")
    for subject in _SUBJECTS:
        subject.add_commands(commands)

    def show_help(options: argparse.Namespace) -> int:
        parser.print_help(sys.stderr)
        return ExitCode.MISTAKE

    parser.set_defaults(command=show_help)
    return parser
