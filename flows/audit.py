"""`fp8-grpo verify`: whether a run's folder is what its ledger says, and who made it with what.

A run that is going on can be looked at: its lock is not taken, and what is not committed yet is not an error.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from flows.arguments import add_output
from flows.named_run import find_run

if TYPE_CHECKING:
    from fp8core.store.folder_digest import Report


def add_command(commands: Any) -> None:
    """Declare the command on the parser's subcommands."""
    parser = commands.add_parser("verify", help="check every digest of a run and the chain of its steps")
    parser.add_argument("run", metavar="RUN", help="a run (name or folder)")
    add_output(parser, "--json", "write run, findings and counts as JSON")
    parser.set_defaults(command=verify_run)


def verify_run(options: argparse.Namespace) -> int:
    """Check, print and write; returns 1 when anything is wrong, raises UserError."""
    from fp8core.report.provenance import Provenance
    from fp8core.store.audit import audit
    from fp8core.store.audit_files import audited_bytes, references
    from fp8core.store.evidence import collect

    began, read = time.perf_counter(), 0
    evidence, provenance = collect(find_run(options.run)), Provenance()
    with _bar(audited_bytes(evidence)) as advance:

        def report(more: int) -> None:
            nonlocal read
            read += more
            advance(more)

        findings = list(audit(evidence, report, provenance.add))
    print(provenance.text(evidence))
    for finding in findings:
        print(finding)
    counts = {
        "steps": len(evidence.steps),
        "artifacts": len(references(evidence)),
        "bytes": read,
        "seconds": time.perf_counter() - began,
        "errors": sum(finding.severity == "error" for finding in findings),
        "notes": sum(finding.severity == "note" for finding in findings),
    }
    print(
        "verified: {steps} steps, {artifacts} artifacts, {bytes:,} bytes, {seconds:.1f} s; "
        "errors: {errors}, notes: {notes}".format(**counts)
    )
    if options.json is not None:
        found = [asdict(finding) for finding in findings]
        content = {"run": provenance.content(evidence), "findings": found, "counts": counts}
        options.json.write_text(json.dumps(content, indent=2) + "\n")
    return 1 if counts["errors"] else 0


@contextmanager
def _bar(size: int) -> Iterator["Report"]:
    """A bar on stderr while that is a terminal; yields what moves it by a number of bytes."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    console = Console(file=sys.stderr)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=size)
        yield lambda more: progress.update(task, advance=more)
