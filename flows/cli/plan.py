"""`fp8-grpo plan`: a training's use of each device, and if it fits, before anything is loaded."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.cli.arguments import add_config, add_output
from flows.cli.places import placed
from flows.environment import search_last
from flows.launch import say
from flows.termination import ExitCode

if TYPE_CHECKING:
    from fp8core.config.run import RunConfig
    from fp8core.resources.memory import Machine


def add_command(commands: Any) -> None:
    parser = commands.add_parser("plan", help="say what memory a training takes, and whether it fits")
    add_config(parser)
    parser.add_argument(
        "--gpu", metavar="NAME", help="plan for h100, h200 or b200 (default: the GPU here; h200 where there is none)"
    )
    add_output(parser, "--json", "write the plan as JSON, in bytes")
    parser.set_defaults(command=plan_config)


def plan_config(options: argparse.Namespace) -> int:
    """Print and write the plan; returns the exit code, raises UserError where it does not fit."""
    from fp8core.config.load import load_config
    from fp8core.models.hub import model_shape
    from fp8core.plan.run_plan import check_fit, plan_run, verdict
    from fp8core.report.text import plan_text
    from fp8core.run.checks.machine import check_shape
    from fp8core.run.checks.settings import graph_on

    search_last(Path.cwd())
    config = load_config(options.config, options.overrides)
    with placed(options.config, options.overrides):
        arch = model_shape(config)
        check_shape(config, arch)
        machine = _machine(options, config)
        graph_on(config, "cpu" if machine.gpu is None else machine.gpu.platform)
    plan = plan_run(config, arch, machine)
    say(plan_text(plan))
    if options.json is not None:
        options.json.write_json({"fits": not plan.refusals, **asdict(plan)})
    check_fit(plan)
    say(verdict(plan))
    return ExitCode.DONE


def _machine(options: argparse.Namespace, config: "RunConfig") -> "Machine":
    """This machine, or one with the named GPU and an unknown host."""
    from fp8core.config.capability import this_node
    from fp8core.resources.memory import GPUS, Machine, machine_of, named_gpu
    from fp8core.run.machine import wants_gpus

    if options.gpu is not None:
        return Machine(named_gpu(options.gpu), None)
    here = machine_of(this_node())
    return Machine(GPUS["h200"], None) if here.gpu is None and wants_gpus(config) else here
