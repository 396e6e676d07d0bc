"""The `fp8-grpo` command.

Exit codes: 0 done; 1 the training failed; 2 the user's mistake, found before any work; 3 paused by a bound of
`alignment.stop`; 130 stopped by Ctrl-C, at once; 143 stopped by SIGTERM, after the step it came in.
"""

import argparse
import json
import os
import secrets
import shlex
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flows import (
    audit,
    bisect,
    compare,
    evaluate_command,
    export,
    parity_command,
    plan,
    replay,
    report,
    resume,
    retention,
    up,
)
from flows.arguments import add_output, add_overrides
from flows.launch import launch, stopped
from flows.quantise import add_commands
from fp8core.errors import UserError

if TYPE_CHECKING:
    from fp8core.config.run import RunConfig


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; mistakes of the user are one line on stderr."""
    # Steps of the user's own (`uses: mine:score`) lie in the working directory, which a console script leaves out.
    sys.path.insert(0, os.getcwd())
    try:
        options = _parser().parse_args(arguments)
        code = int(options.command(options))
        sys.stdout.flush()
        return code
    except UserError as error:
        return stopped(str(error), 2)
    except KeyboardInterrupt:
        return stopped("interrupted", 128 + signal.SIGINT)
    except BrokenPipeError:
        # The reader is gone (`| head`). Python flushes once more at exit, and must find somewhere to write.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fp8-grpo", description="GRPO in block-wise FP8.")
    parser.set_defaults(command=lambda options: _help(parser))
    commands = parser.add_subparsers(metavar="COMMAND")
    run = _add(commands, "run", _run, "train, or continue a run")
    add_output(run, "--json", "write the summary as JSON")
    _add(commands, "graph", _graph, "draw the iteration of a configuration")
    _add(commands, "config", _config, "print a configuration with the origin of each value")
    commands.add_parser("doctor", help="say what this machine can run").set_defaults(command=_doctor)
    add_commands(commands)
    bisect.add_command(commands)
    evaluate_command.add_command(commands)
    replay.add_command(commands)
    export.add_command(commands)
    resume.add_command(commands)
    audit.add_command(commands)
    compare.add_command(commands)
    report.add_command(commands)
    retention.add_command(commands)
    parity_command.add_command(commands)
    plan.add_command(commands)
    up.add_command(commands)
    return parser


def _add(commands: Any, name: str, command: Any, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text)
    parser.add_argument("config", help="a shipped configuration (tiny, gsm8k) or a YAML file")
    add_overrides(parser)
    parser.set_defaults(command=command)
    return parser


def _help(parser: argparse.ArgumentParser) -> int:
    parser.print_help(sys.stderr)
    return 2


def _run(options: argparse.Namespace) -> int:
    config = _load(options)
    name = config.run or f"{config.name}-{secrets.token_hex(4)}"
    given = {"config": options.config, "run": name, "overrides": options.overrides}
    named = config.model_copy(update={"run": name})
    return launch(named, given, options.json, _resume_command(named, name))


def _resume_command(config: "RunConfig", name: str) -> str:
    """A name alone is looked for below ./runs."""
    place = name if config.runs == type(config).model_fields["runs"].default else str(config.runs.absolute() / name)
    return f"fp8-grpo resume {shlex.quote(place)}"


def _graph(options: argparse.Namespace) -> int:
    from fp8core.config.load import load_open_config
    from fp8core.report.graph import pipeline_mermaid, pipeline_text
    from tasks.opening import pipeline_of

    plan = pipeline_of(load_open_config(options.config, options.overrides))
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
