"""`fp8-grpo bisect`: find the layer or operation that makes a policy's log-probs differ from another precision's."""

import argparse
from dataclasses import asdict
from typing import Any

from flows.cli.arguments import add_output, add_overrides, at_least
from flows.environment import set_engine_variables
from flows.launch import long_part, say
from flows.run_lookup import description_of, find_run
from flows.termination import ExitCode
from fp8core.config.load import load_config, reload_config
from fp8core.config.run import own_code, public_dump
from fp8core.errors import UserError


def add_commands(commands: Any) -> None:
    parser = commands.add_parser("bisect", help="rank layers or operations by their share of the log-prob error")
    parser.add_argument("run", metavar="RUN", help="a run (name or folder)")
    add_overrides(parser)
    parser.add_argument(
        "--against",
        choices=("bf16", "fp8_block", "fp32"),
        default="bf16",
        help="the precision that precision.rollout is compared with (default bf16)",
    )
    parser.add_argument(
        "--by", choices=("layer", "operation", "both"), default="layer", help="what to flip at a time (default layer)"
    )
    parser.add_argument("--prompts", type=at_least(1), default=16, metavar="N", help="how many prompts (default 16)")
    add_output(parser, "--json", "write the ranking as JSON")
    parser.set_defaults(command=bisect_run)


def bisect_run(options: argparse.Namespace) -> int:
    import torch

    from fp8core.report.text import bisection_text
    from fp8core.run.bisection import run_subject

    folder = find_run(options.run)
    # A run is measured under its own settings, whatever its pipeline.
    pipeline = public_dump(load_config("tiny"))["pipeline"]
    config = reload_config({**description_of(folder).config, "pipeline": pipeline}, options.overrides)
    for key, path in own_code(config).items():
        if key in ("loss.policy", "rollout.engine"):
            raise UserError(f"{folder}: {key}={path} is code that its run.json names, which is never imported here")
    set_engine_variables(config)
    torch.set_num_threads(config.threads)
    subject, rollout = run_subject(config, folder, options.prompts), config.precision.rollout
    title = f"{options.run}: {rollout.linear}, {rollout.kv_cache} cache, against {options.against}"
    say(f"{title}; {subject.passes(options.by)} passes over {len(subject.task.sequences)} sequences")
    with long_part(f"passes by {options.by}"):
        bisection = subject.bisected(options.against, options.by)
    say(bisection_text(bisection))
    if options.json is not None:
        options.json.write_json({"compared": title, **asdict(bisection)})
    return ExitCode.DONE
