"""`fp8-grpo evaluate` and `parity`: flows in this process, with a Prefect server of its own where none is set."""

import argparse
import re
import signal
import sys
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flows.cli.arguments import add_output, add_overrides, add_trust, at_least, numbers
from flows.environment import prepare_prefect, search_last
from flows.launch import exit_with, explain, long_part, say
from flows.run_lookup import admit_code, enter_origin, find_run
from flows.termination import ExitCode
from fp8core.config.run import RUN_NAME


def add_commands(commands: Any) -> None:
    _add_evaluate(commands)
    parser = commands.add_parser("parity", help="train in BF16 and in FP8, and judge whether FP8 learns the same")
    parser.add_argument(
        "config", nargs="?", metavar="CONFIG", help="a shipped configuration or a YAML file (default: tiny-nightly)"
    )
    parser.add_argument("--name", type=_name, help="name of the parity run; an existing one is continued")
    seeds = numbers(0, 2**31 - 1, 100)
    parser.add_argument("--seeds", type=seeds, metavar="N[,N]", help="seeds of every variant (default: as configured)")
    help_ = "what to train (default: all)"
    parser.add_argument("--variant", action="append", dest="variants", metavar="NAME", help=help_)
    parser.add_argument("--set", action="append", dest="overrides", metavar="KEY=VALUE", help="override a setting")
    parser.set_defaults(command=run_parity)


def _add_evaluate(commands: Any) -> None:
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
    _begin("flows.evaluate")
    # Prefect reads its environment when it is imported, hence not before.
    from flows.evaluate import evaluate

    output = None if options.json is None else str(options.json.target)
    state: Any = evaluate(**parameters, output=output, return_state=True)
    if state.is_completed():
        return ExitCode.DONE
    explain(state)
    return ExitCode.FAILED


def _begin(flow: str) -> None:
    prepare_prefect(flow)
    # An exception, so that Prefect's server hears of it, and stops with us.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(exit_with("terminated", ExitCode.TERMINATED)))


def run_parity(options: argparse.Namespace) -> int:
    """Run the flow; returns the exit code: 0 for PASS, 1 for FAIL, 4 for NOT ENOUGH DATA. Raises UserError."""
    from flows.parity_plan import refuse  # Imports torch.

    search_last(Path.cwd())
    names = ("config", "name", "seeds", "variants", "overrides")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    # The flow does so too. Here no server, folder or verdict comes of a mistake, and Prefect stores no password.
    refuse(**{"config": "tiny-nightly", **given}, date=datetime.now(UTC).date().isoformat())
    _begin("flows.parity")
    from flows.parity import parity
    from fp8core.parity import NOT_ENOUGH

    state: Any = parity(**given, return_state=True)
    if state.is_completed() or state.name == NOT_ENOUGH:
        say(f"fp8-grpo: {state.message}")
        return ExitCode.DONE if state.is_completed() else ExitCode.UNDECIDED
    explain(state)
    return ExitCode.FAILED


def _name(text: str) -> str:
    if len(text) > 80 or not re.fullmatch(RUN_NAME, text):
        raise argparse.ArgumentTypeError(f"expected up to 80 letters, digits, '.', '_' and '-', found {text!r}")
    return text
