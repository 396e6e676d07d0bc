"""Commands that write a folder of a model: `export`, and `quantise` to block FP8."""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.cli.arguments import add_target, add_trust, at_least
from flows.environment import set_engine_variables
from flows.launch import long_part, say, stopped
from flows.run_lookup import admit_code, enter_origin, find_run
from flows.termination import ExitCode

if TYPE_CHECKING:
    from fp8core.config.run import RunConfig
    from fp8core.models.quantised_checkpoint import Quantisation
    from fp8core.run.export import ExportedPolicy
    from fp8core.run.replay import RunSnapshot


def add_commands(commands: Any) -> None:
    parser = commands.add_parser("quantise", help="write a checkpoint's linears in block FP8")
    parser.add_argument("source", type=Path, metavar="SOURCE", help="folder of the checkpoint")
    add_target(parser)
    parser.add_argument("--first", type=at_least(0), default=0, metavar="N", help="keep the first N layers in BF16")
    parser.add_argument("--last", type=at_least(0), default=0, metavar="N", help="keep the last N layers in BF16")
    parser.add_argument(
        "--scale-rule", choices=("pow2", "fp32"), default="pow2", help="powers of two (default) or FP32 scales"
    )
    parser.set_defaults(command=quantise_folder)
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
    """Returns the exit code (1: the policy cannot be restored equal), raises UserError."""
    import torch

    from fp8core.report.console import Console
    from fp8core.run.export import export, refuse_existing, refuse_format, stored_policy
    from fp8core.run.recompute import RedoError
    from fp8core.run.replay import FAILURES, RunSnapshot

    torch.set_num_threads(1)
    refuse_existing(options.target)
    folder, target, here = find_run(options.run), options.target.absolute(), Path.cwd()
    enter_origin(folder)
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
            )
    except (RedoError, *FAILURES) as error:
        return stopped(f"the policy after step {options.step} cannot be restored: {error}", ExitCode.FAILED)
    over = ", over the export of --step 0" if options.format == "peft" else ""
    say(f"{options.target}: the policy after step {options.step} of {folder.name} in {options.format}{over}")
    if plan is not None:
        _print_remarks(plan)
    return ExitCode.DONE


def _fp8_plan(original: "RunSnapshot", step: int, policy: "ExportedPolicy") -> "Quantisation":
    """The conversion to block FP8, which leaves in BF16 the layers that the rollouts kept so."""
    from fp8core.models.quantised_checkpoint import plan_quantisation

    precision = original.config(step).precision
    ends = precision.bf16_first_layers, precision.bf16_last_layers
    return plan_quantisation(policy.folder, precision.recipe.weights, *ends)


def _writer(
    written: str, policy: "ExportedPolicy", config: "RunConfig", plan: "Quantisation | None"
) -> Callable[[Path], object]:
    from fp8core.run.export import copy_folder, write_adapter

    if plan is not None:
        return partial(_write_planned, plan)
    return partial(write_adapter, policy, config) if written == "peft" else partial(copy_folder, policy.folder)


def quantise_folder(options: argparse.Namespace) -> int:
    from fp8core.models.quantised_checkpoint import plan_quantisation
    from fp8core.numerics.recipe import RECIPES

    plan = plan_quantisation(options.source, RECIPES[options.scale_rule].weights, options.first, options.last)
    seconds = _write_planned(plan, options.target)
    say(f"{options.target}: {_summary(plan, seconds)}, {options.scale_rule} scales")
    _print_remarks(plan)
    return ExitCode.DONE


def _print_remarks(plan: "Quantisation") -> None:
    narrow = [tensor.spec.name for tensor in plan.quantised if any(side < 128 for side in tensor.spec.shape)]
    if narrow:
        others = f" and {len(narrow) - 1} more" if len(narrow) > 1 else ""
        say(f"narrower than a tile of 128, so vLLM may refuse it: {narrow[0]}{others}")


def _write_planned(plan: "Quantisation", target: Path) -> float:
    """Carry out the plan; returns seconds."""
    import torch

    from fp8core.models.quantised_checkpoint import write_checkpoint

    # The operations are small: beside other work, threads lose far more at their barriers than they gain.
    torch.set_num_threads(1)
    began = time.perf_counter()
    written = 0
    with long_part("MiB read") as progress:

        def report(more: int) -> None:
            nonlocal written
            written += more
            progress(written >> 20, plan.size >> 20)

        write_checkpoint(plan, target, report)
    return time.perf_counter() - began


def _summary(plan: "Quantisation", seconds: float) -> str:
    from fp8core.report.text import with_unit

    parameters = sum(tensor.spec.elements for tensor in plan.tensors)
    return (
        f"{len(plan.quantised)} of {len(plan.tensors)} tensors converted, {parameters:,} parameters, "
        f"{with_unit(plan.size)} read in {seconds:.1f} s"
    )
