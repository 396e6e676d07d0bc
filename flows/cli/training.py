"""`fp8-grpo run` trains, or continues a run; `resume` continues one from its folder, wherever that lies now."""

import argparse
import secrets
import shlex
from pathlib import Path
from typing import Any

from flows.cli.arguments import add_config, add_output, add_overrides, add_trust
from flows.environment import search_last
from flows.launch import launch
from flows.run_lookup import admit_code, enter_origin, find_run, load_settings
from fp8core.config.run import made_name, own_code, resume_command
from fp8core.errors import without_passwords


def add_commands(commands: Any) -> None:
    parser = commands.add_parser("run", help="train, or continue a run")
    add_config(parser)
    add_output(parser, "--json", "write the summary as JSON")
    parser.set_defaults(command=run)
    parser = commands.add_parser("resume", help="continue a run with the configuration it was begun with")
    parser.add_argument("run", metavar="RUN", help="a run (name or folder)")
    add_output(parser, "--json", "write the summary as JSON")
    add_overrides(parser, "set what changes no results, as steps=120, which extends the run")
    parser.add_argument("--new-code", action="store_true", help="go on with other code than last, as a new segment")
    add_trust(parser)
    parser.set_defaults(command=resume)


def run(options: argparse.Namespace) -> int:
    from fp8core.config.load import load_config

    search_last(Path.cwd())
    config = load_config(options.config, options.overrides)
    name = config.run or made_name(config.name, secrets.token_hex(4))
    arguments = {"config": options.config, "run": name, "overrides": options.overrides}
    return launch(config.model_copy(update={"run": name}), arguments, options.json, resume_command(config, name))


def resume(options: argparse.Namespace) -> int:
    folder = find_run(options.run)
    here = Path.cwd()
    overrides = options.overrides
    enter_origin(folder)
    admit_code(folder, overrides, here, trust=options.trust)
    config = load_settings(str(folder), overrides)
    settings = "".join(f" --set {shlex.quote(text)}" for text in overrides if without_passwords(text) == text)
    trust = " --trust" if own_code(config) else ""
    arguments = {"config": str(folder), "overrides": overrides, "new_code": options.new_code}
    return launch(config, arguments, options.json, f"fp8-grpo resume {shlex.quote(options.run)}{settings}{trust}")
