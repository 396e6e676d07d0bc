"""`fp8-grpo compare`: check that two runs computed the same; else show where they diverge and possible causes."""

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from flows.cli.arguments import add_output
from flows.launch import say
from flows.run_lookup import find_run
from flows.termination import ExitCode
from fp8core.errors import UserError

if TYPE_CHECKING:
    from fp8core.store.diff import Comparison

_WHY = {"steps": " (the last step of a run always evaluates)"}


def add_command(commands: Any) -> None:
    parser = commands.add_parser("compare", help="name the first difference between two runs")
    parser.add_argument("runs", metavar="RUN", nargs="*", help="two runs (names or folders)")
    add_output(parser, "--json", "write the comparison as JSON")
    parser.set_defaults(command=compare_runs)


def compare_runs(options: argparse.Namespace) -> int:
    """Compare, print and write; returns 1 when the runs differ, raises UserError."""
    from fp8core.store.diff import compare
    from fp8core.store.run_view import RunView

    if len(options.runs) != 2:
        raise UserError(f"compare: it compares two runs, and {len(options.runs)} were given")
    found = compare(*(RunView.read(find_run(run)) for run in options.runs))
    say(comparison_text(found))
    if options.json is not None:
        options.json.write_json({"equal": found.equal, **asdict(found)})
    return ExitCode.DONE if found.equal else ExitCode.FAILED


def comparison_text(found: "Comparison") -> str:
    lines = [f"configuration  {difference}" for difference in found.configuration]
    lines += [f"circumstances  {difference} (from step {step})" for step, difference in found.circumstances]
    if found.first_step is not None:
        lines.append("first field    step {}: {}".format(*found.first_step))
    if found.first_metric is not None:
        lines.append("first metric   step {}: {}".format(*found.first_metric))
    lines += [f"note           {difference}{_WHY.get(difference.path, '')}" for difference in found.notes]
    if found.last[0] != found.last[1]:
        lines.append("note           the last committed steps are {} and {}".format(*found.last))
    return "\n".join([*lines, _verdict(found)])


def _verdict(found: "Comparison") -> str:
    steps = f"steps {found.common[0]} to {found.common[-1]}"
    if found.equal:
        return f"equal: {steps}"
    if found.first_step is None:
        return f"different: not in what {steps} computed"
    return f"different: from step {found.first_step[0]} on"
