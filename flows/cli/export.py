"""`fp8-grpo export` and `report`: the policy after a step as a folder of a model, and one page about some runs."""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from flows.cli.arguments import add_output, add_trust
from flows.environment import set_engine_variables
from flows.launch import exit_with, say
from flows.run_lookup import admit_code, enter_origin, find_run
from flows.termination import ExitCode


def add_commands(commands: Any) -> None:
    parser = commands.add_parser("export", help="write the policy after a step as a Hugging Face folder")
    parser.add_argument("run", metavar="RUN", help="a run (name or folder); it is only read, and may be live")
    parser.add_argument("target", type=Path, metavar="TARGET", help="folder to be made")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="the step; 0 is the initial policy")
    parser.add_argument(
        "--format",
        choices=("bf16", "fp8", "peft"),
        default="bf16",
        help="of the linears (default bf16); peft writes the adapters of `training.lora` alone",
    )
    add_trust(parser)
    parser.set_defaults(command=export_step)
    parser = commands.add_parser("report", help="write one HTML page about one or more runs")
    parser.add_argument("runs", metavar="RUN", nargs="+", help="a run (name or folder); several are overlaid")
    add_output(parser, "--out", "the page to write (default report.html)", "report.html")
    parser.set_defaults(command=report_runs)


def export_step(options: argparse.Namespace) -> int:
    """Returns the exit code (1: the policy cannot be restored equal), raises UserError."""
    import torch

    from fp8core.models.checkpoint import write_fp8_checkpoint
    from fp8core.report.console import Console
    from fp8core.run.export import check_format, check_target, copy_folder, export, stored_policy, write_adapter
    from fp8core.run.replay import FAILURES, RunSnapshot
    from fp8core.run.resume import RedoError

    torch.set_num_threads(1)
    check_target(options.target)
    folder = find_run(options.run)
    target = options.target.absolute()
    here = Path.cwd()
    enter_origin(folder)
    admit_code(folder, (), here, trust=options.trust)
    original = RunSnapshot.read(folder)
    original.check_step(options.step)
    config = original.config(options.step)
    check_format(config, options.format)
    set_engine_variables(config)
    precision = config.precision
    # Layers that the rollouts kept in BF16 stay so.
    bf16_layers = precision.bf16_first_layers, precision.bf16_last_layers
    try:
        with stored_policy(original, options.step, Console(sys.stderr, options.step)) as policy:
            writers: dict[str, Callable[[Path], object]] = {
                "bf16": partial(copy_folder, policy.folder),
                "fp8": lambda target: write_fp8_checkpoint(
                    policy.folder, target, precision.recipe.weights, *bf16_layers
                ),
                "peft": partial(write_adapter, policy, config),
            }
            export(original, options.step, policy, options.format, target, writers[options.format])
    except (RedoError, *FAILURES) as error:
        return exit_with(f"the policy after step {options.step} cannot be restored: {error}", ExitCode.FAILED)
    over = ", over the export of --step 0" if options.format == "peft" else ""
    say(f"{options.target}: the policy after step {options.step} of {folder.name} in {options.format}{over}")
    return ExitCode.DONE


def report_runs(options: argparse.Namespace) -> int:
    """Read and write; returns the exit code, 1 when a file is damaged; raises UserError."""
    from fp8core.report.pages import report_html
    from fp8core.report.run_data import labels, read_run

    folders = [find_run(run) for run in options.runs]
    runs = [read_run(folder, label) for folder, label in zip(folders, labels(folders), strict=True)]
    options.out.write(report_html(runs).encode())
    say(options.out.target)
    damage_lines = [f"{run.view.folder}: {line}" for run in runs for line in run.damage_lines]
    if damage_lines:
        more = f" (and {len(damage_lines) - 1} more, which the page lists)" if len(damage_lines) > 1 else ""
        return exit_with(f"{damage_lines[0]}{more}", ExitCode.FAILED)
    return ExitCode.DONE
