"""`fp8-grpo plan`: a training's use of each device, and if it fits, before anything is loaded."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.cli.arguments import add_force, add_output, add_overrides, at_least
from flows.environment import search_last
from flows.launch import say
from fp8core.user_files import json_output

if TYPE_CHECKING:
    from fp8core.config.run import RunConfig
    from fp8core.plan.memory import Machine
    from fp8core.training.memory import Parallel


def add_command(commands: Any) -> None:
    """Declare the command on the parser's subcommands."""
    parser = commands.add_parser("plan", help="say what memory a training takes, and whether it fits")
    parser.add_argument("config", help="a shipped configuration (tiny, qwen3) or a YAML file")
    add_overrides(parser)
    parser.add_argument(
        "--gpu", metavar="NAME", help="plan for h100, h200 or b200 (default: the GPU here; h200 where there is none)"
    )
    parser.add_argument(
        "--gpus", type=at_least(1), default=0, metavar="N", help="GPUs that train (default: what the trainer uses here)"
    )
    for name, parts in (("tensor", "linears"), ("pipeline", "layers"), ("expert", "experts")):
        text = f"of these, how many share {parts}"
        parser.add_argument(f"--{name}", type=at_least(1), default=1, metavar="N", help=text)
    add_output(parser, "--json", json_output("fits", "parameters"), "write the plan as JSON, in bytes")
    add_force(parser)
    parser.set_defaults(command=plan_config)


def plan_config(options: argparse.Namespace) -> int:
    """Print and write the plan; returns the exit code, raises UserError where it does not fit."""
    from fp8core.config.load import load_config
    from fp8core.models.hub import model_shape
    from fp8core.plan.run_plan import plan_run, refuse_unfit
    from fp8core.report.text import plan_text
    from fp8core.training.registry import trainer_grid

    search_last(Path.cwd())
    config = load_config(options.config, options.overrides)
    arch = model_shape(config)
    machine = _machine(options, config)
    plan = plan_run(config, arch, machine, _parallel(options) or trainer_grid(config, machine))
    say(plan_text(plan))
    if options.json is not None:
        options.json.write_json({"fits": not plan.refusals, **asdict(plan)})
    refuse_unfit(plan)
    return 0


def _machine(options: argparse.Namespace, config: "RunConfig") -> "Machine":
    """This machine, or one with the named GPU and an unknown host."""
    from fp8core.plan.memory import GPUS, Machine, named_gpu, this_machine
    from fp8core.rollout.registry import engine_entry
    from fp8core.training.registry import trainer_of

    if options.gpu is not None:
        return Machine(named_gpu(options.gpu), None)
    here = this_machine()
    training = trainer_of(config.training).needs_gpu(config)
    wanted = engine_entry(config).gpus(config) or training or options.gpus
    elsewhere = here.gpu is None and wanted
    return Machine(GPUS["h200"], None) if elsewhere else here


def _parallel(options: argparse.Namespace) -> "Parallel | None":
    from fp8core.errors import UserError
    from fp8core.training.memory import Parallel

    if options.gpus:
        return Parallel(options.gpus, options.tensor, options.pipeline, options.expert)
    if (options.tensor, options.pipeline, options.expert) != (1, 1, 1):
        raise UserError("--tensor, --pipeline and --expert divide the GPUs of --gpus N")
    return None
