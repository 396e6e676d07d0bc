"""`fp8-grpo compile`: the kernels that a training needs, before it begins."""

import argparse
from pathlib import Path
from typing import Any

from flows.cli.arguments import add_config
from flows.environment import kernel_folders, search_last, set_engine_variables
from flows.launch import long_part, say
from flows.termination import ExitCode


def add_command(commands: Any) -> None:
    parser = commands.add_parser("compile", help="compile a training's kernels")
    add_config(parser)
    parser.set_defaults(command=compile_config)


def compile_config(options: argparse.Namespace) -> int:
    from fp8core.config.capability import this_platform
    from fp8core.config.load import load_config
    from fp8core.errors import UserError
    from fp8core.models.hub import model_shape
    from fp8core.run.compilation import compile_kernels, needs_kernels

    search_last(Path.cwd())
    config = load_config(options.config, options.overrides)
    if config.cluster.address is not None:
        raise UserError(f"cluster.address={config.cluster.address}: compile on each node, with cluster.address=null")
    # A machine without a GPU may lack the engine, too, whose absence is not what stops this.
    if needs_kernels(config, model_shape(config)) and this_platform() != "cpu":
        set_engine_variables(config)
    with long_part("compiling kernels") as progress:
        say(compile_kernels(config, this_platform(), kernel_folders(), progress))
    return ExitCode.DONE
