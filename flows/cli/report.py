"""`fp8-grpo report`: one HTML page that overlays one or more runs, from their folders alone."""

import argparse
from typing import Any

from flows.cli.arguments import add_output
from flows.launch import exit_with, say
from flows.run_lookup import find_run
from flows.termination import ExitCode


def add_commands(commands: Any) -> None:
    parser = commands.add_parser("report", help="write one HTML page about one or more runs")
    parser.add_argument("runs", metavar="RUN", nargs="+", help="a run (name or folder); several are overlaid")
    add_output(parser, "--out", "the page to write (default report.html)", "report.html")
    parser.set_defaults(command=report_runs)


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
