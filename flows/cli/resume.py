"""`fp8-grpo resume`: continue a run from the contents of its folder, wherever that folder lies now."""

import argparse
import shlex
from pathlib import Path
from typing import Any

from flows.cli.arguments import add_output, add_overrides, add_trust
from flows.launch import launch
from flows.run_lookup import admit_code, enter_origin, find_run_in, load_settings
from fp8core.config.run import own_code
from fp8core.errors import without_passwords


def add_command(commands: Any) -> None:
    parser = commands.add_parser("resume", help="continue a run with the configuration it was begun with")
    parser.add_argument("run", metavar="RUN", help="a run (name or folder)")
    add_output(parser, "--json", "write the summary as JSON")
    add_overrides(parser, "set what changes no results, as steps=120, which extends the run")
    parser.add_argument("--new-code", action="store_true", help="go on with other code than last, as a new segment")
    add_trust(parser)
    parser.set_defaults(command=resume_run)


def resume_run(options: argparse.Namespace) -> int:
    folder, others = find_run_in(options.run, options.overrides)
    here = Path.cwd()
    overrides = enter_origin(folder, others)
    admit_code(folder, overrides, here, trust=options.trust, replaces_cluster=True)
    config = load_settings(str(folder), overrides)
    settings = "".join(f" --set {shlex.quote(text)}" for text in options.overrides if without_passwords(text) == text)
    trust = " --trust" if own_code(config) else ""
    given = {"config": str(folder), "overrides": overrides, "new_code": options.new_code}
    return launch(config, given, options.json, f"fp8-grpo resume {shlex.quote(options.run)}{settings}{trust}")
