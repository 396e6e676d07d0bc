"""`fp8-grpo export`: the policy after a step as a folder that transformers and vLLM load."""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.cli.arguments import add_target, add_trust
from flows.cli.quantise import print_remarks, write_planned
from flows.environment import set_engine_variables
from flows.launch import say, stopped
from flows.run_lookup import admit_code, enter_origin, find_run
from flows.termination import ExitCode

if TYPE_CHECKING:
    from fp8core.config.run import RunConfig
    from fp8core.models.quantised_checkpoint import CheckpointConversion
    from fp8core.run.export import ExportedPolicy
    from fp8core.run.snapshot import RunSnapshot


def add_command(commands: Any) -> None:
    parser = commands.add_parser("export", help="write the policy after a step as a Hugging Face folder")
    parser.add_argument("run", metavar="RUN", help="a run (name or folder); it is only read, and may be live")
    add_target(parser)
    parser.add_argument("--step", type=int, required=True, metavar="N", help="the step; 0 is the initial policy")
    parser.add_argument(
        "--format",
        choices=("bf16", "fp8", "peft"),
        default="bf16",
        help="of the linears (default bf16; fp8 as `quantise`); peft writes the adapters of `training.lora` alone",
    )
    add_trust(parser)
    parser.set_defaults(command=export_step)


def export_step(options: argparse.Namespace) -> int:
    """Write and link the policy; returns the exit code (1: it cannot be restored equal), raises UserError."""
    import torch

    from flows.tracking.results import link_export, tracked
    from flows.tracking.store import quiet_store_logs
    from fp8core.report.console import Console
    from fp8core.run.export import export, refuse_existing, refuse_format, stored_policy
    from fp8core.run.recompute import RedoError
    from fp8core.run.snapshot import FAILURES, RunSnapshot

    quiet_store_logs()
    torch.set_num_threads(1)
    refuse_existing(options.target)
    folder, target, here = find_run(options.run), options.target.absolute(), Path.cwd()
    enter_origin(folder, ())
    admit_code(folder, (), here, trust=options.trust)
    original = RunSnapshot.read(folder)
    original.refuse_unknown(options.step)
    refuse_format(original.config(options.step), options.format)
    set_engine_variables(original.config(options.step))
    try:
        with stored_policy(original, options.step, Console(sys.stderr, options.step)) as policy:
            plan = _fp8_plan(original, options.step, policy) if options.format == "fp8" else None
            export(
                original,
                options.step,
                policy,
                options.format,
                target,
                _writer(options.format, policy, original.config(options.step), plan),
                tracked(folder, options.step),
            )
    except (RedoError, *FAILURES) as error:
        return stopped(f"the policy after step {options.step} cannot be restored: {error}", ExitCode.FAILED)
    over = ", over the export of --step 0" if options.format == "peft" else ""
    say(f"{options.target}: the policy after step {options.step} of {folder.name} in {options.format}{over}")
    if plan is not None:
        print_remarks(plan)
    say(link_export(folder, options.step, target))
    return ExitCode.DONE


def _fp8_plan(original: "RunSnapshot", step: int, policy: "ExportedPolicy") -> "CheckpointConversion":
    """The conversion to block FP8, which leaves in BF16 the layers that the rollouts kept so."""
    from fp8core.models.quantised_checkpoint import plan_quantisation

    precision = original.config(step).precision
    ends = precision.bf16_first_layers, precision.bf16_last_layers
    return plan_quantisation(policy.folder, precision.recipe.weights, *ends)


def _writer(
    written: str, policy: "ExportedPolicy", config: "RunConfig", plan: "CheckpointConversion | None"
) -> Callable[[Path], None]:
    from fp8core.run.export import copy_folder, write_adapter

    match written:
        case "bf16":
            return partial(copy_folder, policy.folder)
        case "peft":
            return partial(write_adapter, policy, config)
    assert plan is not None, written

    def write_fp8(target: Path) -> None:
        write_planned(plan, target)

    return write_fp8
