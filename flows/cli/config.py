"""`fp8-grpo config`: every setting of a configuration with the origin of its value."""

import argparse
import json
from pathlib import Path
from typing import Any

from flows.cli.arguments import add_config
from flows.environment import search_last
from flows.launch import say
from flows.termination import ExitCode


def add_command(commands: Any) -> None:
    text = "print a configuration with the origin of each value"
    checks = "Names, types and bounds of settings are checked here; files, data, model and machine by run."
    parser = commands.add_parser("config", help=text, description=f"{text.capitalize()}. {checks}")
    add_config(parser)
    parser.set_defaults(command=print_config)


def print_config(options: argparse.Namespace) -> int:
    from fp8core.alignment.bounds import stop_bounds
    from fp8core.config.layers import leaves
    from fp8core.config.load import load_config, origins

    search_last(Path.cwd())
    config = load_config(options.config, options.overrides)
    values, bounds = leaves(config.model_dump(mode="json", by_alias=True)), stop_bounds(config)
    resolved = {f"alignment.stop.{name}": value for name, value in bounds.settings().items()}
    for key, origin in origins(options.config, options.overrides).items():
        if values[key] is None and key in resolved:
            say(f"{key} = {json.dumps(resolved[key])}  # default of the {bounds.contract} contract: {bounds.reason}")
        else:
            say(f"{key} = {json.dumps(values[key])}  # {origin}")
    return ExitCode.DONE
