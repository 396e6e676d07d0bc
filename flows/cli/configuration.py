"""Commands on a configuration: `graph`, `config`, `compile` and `plan`. None of them trains."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.cli.arguments import add_config, add_output
from flows.environment import kernel_folders, search_last, set_engine_variables
from flows.launch import long_part, say
from flows.termination import ExitCode
from fp8core.errors import UserError

if TYPE_CHECKING:
    from fp8core.config.run import RunConfig
    from fp8core.resources.memory import Machine


def add_commands(commands: Any) -> None:
    parser = commands.add_parser("graph", help="draw the iteration of a configuration")
    add_config(parser)
    parser.set_defaults(command=graph)
    text = "print a configuration with the origin of each value"
    checks = "Names, types and bounds of settings are checked here; files, data, model and machine by run."
    parser = commands.add_parser("config", help=text, description=f"{text.capitalize()}. {checks}")
    add_config(parser)
    parser.set_defaults(command=print_config)
    parser = commands.add_parser("compile", help="compile a training's kernels")
    add_config(parser)
    parser.set_defaults(command=compile_config)
    parser = commands.add_parser("plan", help="say what memory a training takes, and whether it fits")
    add_config(parser)
    parser.add_argument(
        "--gpu", metavar="NAME", help="plan for h100 or h200 (default: the GPU here; h200 where there is none)"
    )
    add_output(parser, "--json", "write the plan as JSON, in bytes")
    parser.set_defaults(command=plan_config)


def graph(options: argparse.Namespace) -> int:
    from fp8core.config.load import load_config
    from fp8core.report.text import pipeline_text
    from fp8core.run.refusals import pipeline_of

    search_last(Path.cwd())
    say(pipeline_text(pipeline_of(load_config(options.config, options.overrides))))
    return ExitCode.DONE


def print_config(options: argparse.Namespace) -> int:
    from fp8core.alignment.bounds import stop_bounds
    from fp8core.config.layers import leaves
    from fp8core.config.load import load_config, origins

    search_last(Path.cwd())
    config = load_config(options.config, options.overrides)
    values = leaves(config.model_dump(mode="json", by_alias=True))
    bounds = stop_bounds(config)
    bound_values = {f"alignment.stop.{name}": value for name, value in bounds.settings().items()}
    for key, origin in origins(options.config, options.overrides).items():
        if values[key] is None and key in bound_values:
            say(
                f"{key} = {json.dumps(bound_values[key])}  # default of the {bounds.contract} contract: {bounds.reason}"
            )
        else:
            say(f"{key} = {json.dumps(values[key])}  # {origin}")
    return ExitCode.DONE


def compile_config(options: argparse.Namespace) -> int:
    from fp8core.config.capability import this_platform
    from fp8core.config.load import load_config
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


def plan_config(options: argparse.Namespace) -> int:
    from fp8core.config.load import load_config
    from fp8core.models.hub import model_shape
    from fp8core.plan.run_plan import check_fit, fit_summary, plan_run
    from fp8core.report.text import plan_text
    from fp8core.run.build import check_shape
    from fp8core.run.refusals import graph_on

    search_last(Path.cwd())
    config = load_config(options.config, options.overrides)
    arch = model_shape(config)
    check_shape(config, arch)
    machine = _machine(options, config)
    graph_on(config, "cpu" if machine.gpu is None else machine.gpu.platform)
    plan = plan_run(config, arch, machine)
    say(plan_text(plan))
    completions = config.rollout.most_prompts * config.rollout.group_size
    for key, judge in config.judges.items():
        requests = f"up to {completions:,} requests a step, {judge.concurrency} at a time"
        say(f"{key}: {requests}, to {judge.model} at {judge.url}")
    if options.json is not None:
        options.json.write_json({"fits": not plan.refusals, **asdict(plan)})
    check_fit(plan)
    say(fit_summary(plan))
    return ExitCode.DONE


def _machine(options: argparse.Namespace, config: "RunConfig") -> "Machine":
    from fp8core.config.capability import this_node
    from fp8core.resources.memory import GPUS, Machine, machine_of, named_gpu
    from fp8core.run.build import wants_gpus

    if options.gpu is not None:
        return Machine(named_gpu(options.gpu), None)
    here = machine_of(this_node())
    return Machine(GPUS["h200"], None) if here.gpu is None and wants_gpus(config) else here
