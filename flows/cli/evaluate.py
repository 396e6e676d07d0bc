"""`fp8-grpo evaluate`: run the evaluation flow in this process, with a Prefect server of its own where none is set."""

import argparse
import signal
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from flows.cli.arguments import add_output, add_overrides, add_trust, at_least, numbers
from flows.environment import prepare_prefect, search_last
from flows.launch import exit_with, explain, long_part
from flows.run_lookup import admit_code, enter_origin, find_run
from flows.termination import ExitCode


def add_commands(commands: Any) -> None:
    parser = commands.add_parser("evaluate", help="measure a checkpoint: pass@k, majority and intervals, by precision")
    parser.add_argument("target", metavar="RUN|FOLDER", help="a run (name or folder), or the folder of a checkpoint")
    parser.add_argument("--step", type=at_least(0), metavar="N", help="step of the run (default: its last)")
    parser.add_argument("--config", help="configuration of a checkpoint's folder (default: that of the run)")
    parser.add_argument(
        "--data",
        metavar="SOURCE",
        help="a .jsonl file or Hugging Face dataset, NAME=FILE for one of several sources (default: held-out prompts)",
    )
    parser.add_argument("--prompts", type=at_least(1, 1_000_000), metavar="N", help="how many prompts")
    parser.add_argument("--samples", type=at_least(1, 4096), metavar="N", help="completions of each prompt (default 1)")
    help_ = "the k of pass@k (default: 1 and all samples)"
    parser.add_argument("--k", type=numbers(1, 4096, 4096), metavar="K[,K]", help=help_)
    parser.add_argument(
        "--precision",
        action="append",
        dest="precisions",
        choices=("configured", "bf16", "fp8"),
        metavar="PRECISION",
        help="precision to answer in (default: configured); repeat to compare others with the first",
    )
    parser.add_argument(
        "--parts", action="store_true", help="also measure the KL from BF16 of each part of FP8, on a CPU"
    )
    parser.add_argument("--seed", type=at_least(0), help="of samples and of resampling (default 0)")
    add_trust(parser)
    add_output(parser, "--json", "write the result as JSON")
    add_overrides(parser)
    parser.set_defaults(command=evaluate_target)


def _absolute(data: str) -> str:
    """With the absolute path of the file in `FILE` or `NAME=FILE`; a name of a dataset stays."""
    place = data if Path(data).exists() else data.partition("=")[2]
    return f"{data.removesuffix(place)}{Path(place).absolute()}" if place and Path(place).exists() else data


def evaluate_target(options: argparse.Namespace) -> int:
    """Run the flow; returns the exit code (1: it failed), raises UserError."""
    from flows.evaluation import EvaluationRequest, check_readable, refuse

    here = Path.cwd()
    if not (Path(options.target) / "config.json").is_file():
        folder = find_run(options.target)
        if options.config is None:  # Else what is named is named from here.
            options.target = str(folder)
            if options.data is not None:
                options.data = _absolute(options.data)
            enter_origin(folder)
        admit_code(folder, options.overrides, here, trust=options.trust)
    if options.config is not None:
        search_last(here)
    given = {field.name: getattr(options, field.name) for field in fields(EvaluationRequest)}
    parameters = {name: value for name, value in given.items() if value is not None}
    request = EvaluationRequest(**parameters)
    refuse(request)
    with long_part("checking model and data"):
        check_readable(request)
    prepare_prefect("flows.evaluate")
    # An exception, so that Prefect's server hears of it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(exit_with("terminated", ExitCode.TERMINATED)))
    # Prefect reads its environment when it is imported, hence not before `prepare_prefect`.
    from flows.evaluate import evaluate

    output = None if options.json is None else str(options.json.target)
    state: Any = evaluate(**parameters, output=output, return_state=True)
    if state.is_completed():
        return ExitCode.DONE
    explain(state)
    return ExitCode.FAILED
