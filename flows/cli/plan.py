"""`fp8-grpo plan`: a training's use of each device, and if it fits, before anything is loaded."""

import argparse
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.cli.arguments import add_config, add_output, at_least
from flows.cli.places import placed
from flows.environment import search_last
from flows.launch import say
from flows.termination import ExitCode
from fp8core.errors import UserError

if TYPE_CHECKING:
    from fp8core.config.run import RunConfig
    from fp8core.resources.memory import Machine
    from fp8core.training.memory import Parallel


def add_command(commands: Any) -> None:
    parser = commands.add_parser("plan", help="say what memory a training takes, and whether it fits")
    add_config(parser)
    parser.add_argument(
        "--gpu", metavar="NAME", help="plan for h100, h200 or b200 (default: the GPU here; h200 where there is none)"
    )
    parser.add_argument(
        "--gpus",
        type=at_least(1, 4096),
        default=0,
        metavar="N",
        help="GPUs in all; engines and ranks that the configuration leaves at 1 share them (default: as configured)",
    )
    parser.add_argument("--hosts", type=at_least(1), default=1, metavar="N", help="machines with equal shares of them")
    for name, parts in (("tensor", "linears"), ("pipeline", "layers"), ("expert", "experts")):
        text = f"of the GPUs that train, how many share {parts} (default: as configured)"
        parser.add_argument(f"--{name}", type=at_least(1), default=0, metavar="N", help=text)
    add_output(parser, "--json", "write the plan as JSON, in bytes")
    parser.set_defaults(command=plan_config)


def plan_config(options: argparse.Namespace) -> int:
    """Print and write the plan; returns the exit code, raises UserError where it does not fit."""
    from fp8core.config.load import load_config
    from fp8core.models.hub import model_shape
    from fp8core.plan.run_plan import check_fit, plan_run, spread_over, verdict
    from fp8core.report.text import plan_text
    from fp8core.run.checks.machine import check_shape
    from fp8core.run.checks.settings import graph_on
    from fp8core.run.machine import wants_gpus

    search_last(Path.cwd())
    config = load_config(options.config, options.overrides)
    if options.gpus:
        config = spread_over(config, options.gpus)
        if not wants_gpus(config):
            raise UserError(
                f"--gpus {options.gpus}: nothing of {config.name} computes on a GPU: training.device="
                f"{config.training.device}, rollout.engine={config.rollout.engine}; set one of them, or leave --gpus"
            )
    with placed(options.config, options.overrides):
        arch = model_shape(config)
        check_shape(config, arch)
        machine = _machine(options, config)
        graph_on(config, "cpu" if machine.gpu is None else machine.gpu.platform)
    plan = plan_run(config, arch, machine, _parallel(options, config, machine))
    say(plan_text(plan))
    if options.json is not None:
        options.json.write_json({"fits": not plan.refusals, **asdict(plan)})
    check_fit(plan)
    say(verdict(plan))
    return ExitCode.DONE


def _machine(options: argparse.Namespace, config: "RunConfig") -> "Machine":
    """This machine, or one with the named GPU and an unknown host, as often as there are hosts."""
    from fp8core.resources.memory import GPUS, Machine, named_gpu, this_machine
    from fp8core.rollout.registry import engine_entry
    from fp8core.training.registry import trainer_of

    if options.hosts > 1 and options.gpus % options.hosts:
        raise UserError(f"--gpus {options.gpus}: no multiple of --hosts {options.hosts}")
    if options.gpu is not None:
        return Machine(named_gpu(options.gpu), None, options.hosts)
    here = this_machine()
    training = trainer_of(config.training).needs_gpu(config)
    wanted = engine_entry(config).gpus(config) or training or options.gpus
    elsewhere = here.gpu is None and wanted
    return Machine(GPUS["h200"], None, options.hosts) if elsewhere else replace(here, hosts=options.hosts)


def _parallel(options: argparse.Namespace, config: "RunConfig", machine: "Machine") -> "Parallel | None":
    from fp8core.training.registry import trainer_grid

    shares = options.tensor, options.pipeline, options.expert
    if any(shares) and not options.gpus:
        raise UserError("--tensor, --pipeline and --expert divide the GPUs of --gpus N")
    found = trainer_grid(config, machine)
    if any(shares) and found is None:
        raise UserError(f"--tensor, --pipeline and --expert: training.trainer={config.training.trainer} has no grid")
    if not options.gpus or found is None:
        return found
    names = ("tensor", "pipeline", "expert")
    return replace(found, **{name: share for name, share in zip(names, shares, strict=True) if share})
