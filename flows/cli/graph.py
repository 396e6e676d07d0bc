"""`fp8-grpo graph`: the iteration of a configuration as text and as Mermaid."""

import argparse
from pathlib import Path
from typing import Any

from flows.cli.arguments import add_config
from flows.cli.places import placed
from flows.environment import search_last
from flows.launch import say
from flows.termination import ExitCode


def add_command(commands: Any) -> None:
    parser = commands.add_parser("graph", help="draw the iteration of a configuration")
    add_config(parser)
    parser.set_defaults(command=graph)


def graph(options: argparse.Namespace) -> int:
    from fp8core.config.load import load_open_config
    from fp8core.report.text import pipeline_mermaid, pipeline_text
    from fp8core.run.checks.settings import pipeline_of

    search_last(Path.cwd())
    with placed(options.config, options.overrides):
        plan = pipeline_of(load_open_config(options.config, options.overrides))
    say(f"{pipeline_text(plan)}\n\n{pipeline_mermaid(plan)}")
    return ExitCode.DONE
