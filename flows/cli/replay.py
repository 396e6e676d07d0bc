"""`fp8-grpo replay`: recompute steps of a run from its artifacts alone, and check that the results are equal."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.cli.arguments import add_output, add_overrides, add_trust
from flows.environment import set_engine_variables
from flows.launch import say
from flows.run_lookup import admit_code, enter_origin, find_run_in
from flows.termination import ExitCode
from fp8core.errors import UserError

if TYPE_CHECKING:
    from fp8core.run.replay import ReplayResult

_WITHIN = "equal within the bounds"


def add_command(commands: Any) -> None:
    parser = commands.add_parser("replay", help="make steps of a run again and compare them with what is stored")
    parser.add_argument("run", metavar="RUN", help="a run (name or folder); it is only read, and may be live")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--step", type=_step, metavar="N", help="the step; 0 is the warm start and first evaluation")
    which.add_argument("--from", type=_step, dest="first", metavar="N", help="the first of several steps")
    parser.add_argument("--to", type=_step, dest="last", metavar="M", help="the last of them (default: of the run)")
    add_overrides(parser, "replay under another setting, to see what it changes")
    parser.add_argument(
        "--repair", action="store_true", help="put damaged files of the run back where the replay made them equal"
    )
    parser.add_argument(
        "--rerun-environments", action="store_true", help="ask environments again, instead of taking recorded answers"
    )
    add_trust(parser)
    add_output(parser, "--json", "write the verdicts as JSON")
    parser.set_defaults(command=replay_steps)


def replay_steps(options: argparse.Namespace) -> int:
    """Replay, print a verdict a step, and write them; returns 1 when a step is different, raises UserError."""
    if options.last is not None and options.first is None:
        raise UserError("--to: names the last of several steps; give the first by --from")
    verdicts = []
    for verdict in _verdicts(options):
        say("\n".join(verdict_lines(verdict)))
        verdicts.append(verdict)
    equal = verdicts[-1].outcome != "different"
    if options.json is not None:
        content = {"equal": equal, "steps": [asdict(verdict) for verdict in verdicts]}
        options.json.write_json(content)
    return ExitCode.DONE if equal else ExitCode.FAILED


def verdict_lines(verdict: "ReplayResult") -> list[str]:
    words = {"equal": "equal", "within": _WITHIN, "different": "different"}
    asked = f", {verdict.asked_again} answers of environments asked again" if verdict.asked_again else ""
    cost = f"{verdict.level}; {verdict.artifacts} artifacts{asked}, {verdict.seconds:.1f} s"
    lines = [f"step {verdict.step}: {words[verdict.outcome]} ({cost})", *verdict.causes]
    labels = ("largest difference" if verdict.outcome == "within" else "first difference", "there")
    lines += [f"{label}: {text}" for label, text in zip(labels, verdict.difference, strict=False)]
    return [lines[0], *(f"  {line}" for line in lines[1:])]


def _verdicts(options: argparse.Namespace) -> "Iterator[ReplayResult]":
    from fp8core.report.console import Console
    from fp8core.run.replay import replay
    from fp8core.run.snapshot import RunSnapshot
    from fp8core.store.run_directory import RunDirectory

    folder, others = find_run_in(options.run, options.overrides)
    here = Path.cwd()
    overrides = enter_origin(folder, others)
    admit_code(folder, overrides, here, trust=options.trust, replaces_cluster=True)
    locked = RunDirectory.create_or_open(folder) if options.repair else nullcontext()
    with locked as repaired:
        original = RunSnapshot.read(folder)
        steps = _range(options, original.ledger.last_step())
        original.refuse_unknown(steps[0])
        set_engine_variables(original.config(steps[0], overrides))
        console = Console(sys.stderr, steps.stop - 1)
        asked_again = options.rerun_environments
        for verdict in replay(original, steps, overrides, console, repaired, rerun_environments=asked_again):
            yield verdict
            if verdict.outcome == "different" and verdict.step < steps[-1]:
                after = steps[steps.index(verdict.step) + 1 :]
                say(f"not replayed: {_named(after)}, which start from what step {verdict.step} gave", sys.stderr)


def _range(options: argparse.Namespace, newest: int | None) -> range:
    first = options.step if options.first is None else options.first
    last = first if options.first is None else newest if options.last is None else options.last
    if options.last is not None and options.last < first:
        raise UserError(f"--to {options.last}: it is before --from {first}")
    if last is None or last < first:
        raise UserError(f"--from {first}: the last step is {last}")
    return range(first, last + 1)


def _named(steps: range) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def _step(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected the number of a step, found {text!r}")
    return int(text)
