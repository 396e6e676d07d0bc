"""`fp8-grpo run`: train, or continue a run."""

import argparse
import secrets
import shlex
from typing import Any

from flows.cli.arguments import add_config, add_output
from flows.launch import launch
from fp8core.errors import without_passwords


def add_command(commands: Any) -> None:
    """Declare the command on the parser's subcommands."""
    parser = commands.add_parser("run", help="train, or continue a run")
    add_config(parser)
    add_output(parser, "--json", "write the summary as JSON")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Train to the last step; returns the exit code, raises UserError."""
    from fp8core.config.load import load_config

    config = load_config(options.config, options.overrides)
    name = config.run or f"{config.name}-{secrets.token_hex(4)}"
    given = {"config": options.config, "run": name, "overrides": options.overrides}
    # A name alone is looked for below ./runs.
    default = type(config).model_fields["runs"].default
    place = name if config.runs == default else str(config.runs.absolute() / name)
    resume = f"fp8-grpo resume {shlex.quote(place)}"
    store = config.tracking.uri
    if store is not None and store == without_passwords(store):
        # `resume` takes no store from the folder (`flows.tracking.store.store_of_folder`).
        resume += f" --set {shlex.quote(f'tracking.uri={store}')}"
    return launch(config.model_copy(update={"run": name}), given, options.json, resume)
