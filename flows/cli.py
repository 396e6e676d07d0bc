"""The `fp8-grpo` command.

Exit codes: 0 done; 1 the training failed; 2 the user's mistake, found before any work; 130 and 143 stopped by Ctrl-C
and by SIGTERM.
"""

import argparse
import json
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flows import audit, bisect, compare, export, replay, retention
from flows.environment import make_prefect_home, quiet_prefect_console, start_prefect, wait_for_prefect
from flows.quantise import add_commands
from fp8core.errors import UserError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; mistakes of the user are one line on stderr."""
    options = _parser().parse_args(arguments)
    # Steps of the user's own (`uses: mine:score`) lie in the working directory, which a console script leaves out.
    sys.path.insert(0, os.getcwd())
    try:
        code = int(options.command(options))
        sys.stdout.flush()
        return code
    except UserError as error:
        return _stopped(str(error), 2)
    except KeyboardInterrupt:
        return _stopped("interrupted; a run continues with --set run=NAME", 128 + signal.SIGINT)
    except BrokenPipeError:
        # The reader is gone (`| head`). Python flushes once more at exit, and must find somewhere to write.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _stopped(reason: str, code: int) -> int:
    print(f"fp8-grpo: {reason}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fp8-grpo", description="GRPO in block-wise FP8.")
    parser.set_defaults(command=lambda options: _help(parser))
    commands = parser.add_subparsers(metavar="COMMAND")
    _add(commands, "run", _run, "train, or continue a run").add_argument(
        "--json", type=Path, metavar="FILE", help="write the summary as JSON"
    )
    _add(commands, "graph", _graph, "draw the iteration of a configuration")
    _add(commands, "config", _config, "print a configuration with the origin of each value")
    commands.add_parser("doctor", help="say what this machine can run").set_defaults(command=_doctor)
    add_commands(commands)
    bisect.add_command(commands)
    replay.add_command(commands)
    export.add_command(commands)
    audit.add_command(commands)
    compare.add_command(commands)
    retention.add_command(commands)
    return parser


def _add(commands: Any, name: str, command: Any, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text)
    parser.add_argument("config", help="a shipped configuration (tiny, gsm8k) or a YAML file")
    parser.add_argument(
        "--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE", help="override a setting"
    )
    parser.set_defaults(command=command)
    return parser


def _help(parser: argparse.ArgumentParser) -> int:
    parser.print_help(sys.stderr)
    return 2


def _run(options: argparse.Namespace) -> int:
    from tasks.opening import plan_of, refuse_conflict

    config = _load(options)
    plan_of(config)
    refuse_conflict(config)
    if options.json is not None:
        _refuse_unwritable(options.json)
    print("starting Prefect and MLflow", flush=True)
    make_prefect_home()
    quiet_prefect_console()
    wait_for_prefect()
    signal.signal(signal.SIGTERM, _terminate)
    start_prefect()
    from flows.grpo import grpo

    state = grpo(config=options.config, overrides=options.overrides, return_state=True)
    if not state.is_completed():
        _explain(state)
        return 1
    if options.json is not None:
        summary = state.result()
        options.json.write_text(json.dumps(summary, indent=2) + "\n")
    return 0


def _refuse_unwritable(file: Path) -> None:
    """Better said now than after the training."""
    if file.is_dir() or not file.parent.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise UserError(f"--json {file}: cannot be written; name a file in a folder that exists")


def _terminate(number: int, frame: object) -> None:
    """Leave by way of an exception, so that the run is closed and Prefect's server stops with us."""
    sys.exit(_stopped("terminated; a run continues with --set run=NAME", 128 + number))


def _explain(state: Any) -> None:
    """One line for a failure with a known cause; the traceback too for one without."""
    from prefect.exceptions import FailedRun

    cause = state.result(raise_on_failure=False)
    if isinstance(cause, BaseException) and not isinstance(cause, FailedRun):
        traceback.print_exception(cause)
    print(f"fp8-grpo: {state.message.splitlines()[0]}", file=sys.stderr)


def _graph(options: argparse.Namespace) -> int:
    from fp8core.report.graph import pipeline_mermaid, pipeline_text
    from tasks.opening import plan_of

    plan = plan_of(_load(options))
    print(pipeline_text(plan))
    print()
    print(pipeline_mermaid(plan))
    return 0


def _config(options: argparse.Namespace) -> int:
    from fp8core.config.load import leaves, origins

    values = leaves(_load(options).model_dump(mode="json", by_alias=True))
    for key, origin in origins(options.config, options.overrides).items():
        print(f"{key} = {json.dumps(values[key])}  # {origin}")
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from fp8core.report.doctor import examine

    print(examine())
    return 0


def _load(options: argparse.Namespace) -> Any:
    from fp8core.config.load import load_config

    return load_config(options.config, options.overrides)


if __name__ == "__main__":
    sys.exit(main())
