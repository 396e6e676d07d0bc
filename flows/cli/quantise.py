"""`fp8-grpo quantise`: a checkpoint to block FP8."""

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.cli.arguments import add_target, at_least
from flows.launch import long_part, say
from flows.termination import ExitCode

if TYPE_CHECKING:
    from fp8core.models.quantised_checkpoint import CheckpointConversion

_SHOWN = 8


def add_command(commands: Any) -> None:
    quantise = commands.add_parser("quantise", help="write a checkpoint's linears in block FP8")
    quantise.add_argument("source", type=Path, metavar="SOURCE", help="folder of the checkpoint")
    add_target(quantise)
    quantise.add_argument("--first", type=at_least(0), default=0, metavar="N", help="keep the first N layers in BF16")
    quantise.add_argument("--last", type=at_least(0), default=0, metavar="N", help="keep the last N layers in BF16")
    quantise.add_argument(
        "--scale-rule", choices=("pow2", "fp32"), default="pow2", help="powers of two (default) or FP32 scales"
    )
    quantise.set_defaults(command=quantise_folder)


def quantise_folder(options: argparse.Namespace) -> int:
    from fp8core.models.quantised_checkpoint import plan_quantisation
    from fp8core.numerics.recipe import RECIPES

    plan = plan_quantisation(options.source, RECIPES[options.scale_rule].weights, options.first, options.last)
    seconds = write_planned(plan, options.target)
    say(f"{options.target}: {_summary(plan, seconds)}, {options.scale_rule} scales")
    print_remarks(plan)
    return ExitCode.DONE


def print_remarks(plan: "CheckpointConversion") -> None:
    narrow = [_kind(spec.name) for spec in plan.converted if any(side < 128 for side in spec.shape)]
    _print_names("narrower than a tile of 128, so vLLM may refuse them", [*dict.fromkeys(narrow)])
    _print_names("not copied", [str(path) for path in plan.left_out])


def _kind(name: str) -> str:
    """The name of a layer's weight without the layer: `model.layers.3.self_attn.k_proj.weight` is `*.k_proj`."""
    return f"*.{name.removesuffix('.weight').rpartition('.')[2]}"


def write_planned(plan: "CheckpointConversion", target: Path) -> float:
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


def _summary(plan: "CheckpointConversion", seconds: float) -> str:
    from fp8core.report.text import with_unit

    return (
        f"{len(plan.converted)} of {len(plan.conversions)} tensors converted, {plan.parameters:,} parameters, "
        f"{with_unit(plan.size)} read in {seconds:.1f} s"
    )


def _print_names(label: str, names: Any) -> None:
    if names:
        others = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        say(f"{label}: {', '.join(names[:_SHOWN])}{others}")
