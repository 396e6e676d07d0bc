"""`fp8-grpo run`: train, or continue a run."""

import argparse
import secrets
from pathlib import Path
from typing import Any

from flows.cli.arguments import add_config, add_output
from flows.cli.places import placed
from flows.environment import search_last
from flows.launch import launch
from flows.run_lookup import refuse_run
from fp8core.config.run import made_name, resume_command


def add_command(commands: Any) -> None:
    parser = commands.add_parser("run", help="train, or continue a run")
    add_config(parser)
    add_output(parser, "--json", "write the summary as JSON")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    from fp8core.config.load import load_config

    search_last(Path.cwd())
    refuse_run(options.config)
    config = load_config(options.config, options.overrides)
    name = config.run or made_name(config.name, secrets.token_hex(4))
    given = {"config": options.config, "run": name, "overrides": options.overrides}
    with placed(options.config, options.overrides):
        return launch(config.model_copy(update={"run": name}), given, options.json, resume_command(config, name))
