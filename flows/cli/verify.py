"""`fp8-grpo verify`: check a run's folder against its ledger, and show its provenance and its anchors.

A live run can be checked: its lock is not taken, and uncommitted files are not an error.
"""

import argparse
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from flows.cli.arguments import add_output
from flows.launch import long_part, say
from flows.run_lookup import find_run
from flows.termination import ExitCode
from fp8core.errors import without_passwords

if TYPE_CHECKING:
    from fp8core.store.manifest import Chain, StepManifest
    from fp8core.store.run_view import Finding, RunView

# That of the lines about the run above them.
_NAME_WIDTH = 16


def add_command(commands: Any) -> None:
    parser = commands.add_parser("verify", help="check every digest of a run and the chain of its steps")
    parser.add_argument("run", metavar="RUN", help="a run (name or folder)")
    parser.add_argument(
        "--tracking-uri",
        type=_store,
        metavar="URI",
        help="ask this MLflow for the head of the chain, not the one that the folder names; `none` asks nobody",
    )
    add_output(parser, "--json", "write run, findings and counts as JSON")
    parser.set_defaults(command=verify_run)


def verify_run(options: argparse.Namespace) -> int:
    """Check, print and write; returns 1 when anything is wrong, raises UserError."""
    from fp8core.run.verify import references, verified_bytes, verify
    from fp8core.store.manifest import Chain
    from fp8core.store.run_view import Provenance, RunView

    began, read = time.perf_counter(), 0
    view, provenance, links = RunView.read(find_run(options.run)), Provenance(), Chain()

    def report(more: int) -> None:
        nonlocal read
        read += more
        progress(read >> 20, size >> 20)

    def watch(manifest: "StepManifest") -> None:
        provenance.add(manifest)
        links.add(manifest)

    size = verified_bytes(view)
    with long_part("MiB verified") as progress:
        findings = list(verify(view, report, watch))
    anchors, found = _anchors(view, links, options.tracking_uri)
    findings += found
    say(provenance.text(view))
    for name, line in anchors.items():
        say(f"{name:<{_NAME_WIDTH}}{line}")
    for finding in findings:
        say(finding)
    named = {reference.ref.uri: reference.ref.digest for reference in references(view)}
    absent = {uri for uri in named if not (view.folder / uri).is_file()}
    counts = {
        "steps": len(view.steps),
        "artifacts": len(named) - len(absent),
        "removed": sum(named[uri] in view.removed for uri in absent),
        "bytes": read,
        "seconds": time.perf_counter() - began,
        "errors": sum(finding.severity == "error" for finding in findings),
        "notes": sum(finding.severity == "note" for finding in findings),
    }
    removed = ", {removed} removed" if counts["removed"] else ""
    say(
        f"verified: {{steps}} steps with the start, {{artifacts}} artifacts{removed}, {{bytes:,}} bytes, "
        "{seconds:.1f} s; errors: {errors}, notes: {notes}".format(**counts)
    )
    if options.json is not None:
        found_json = [asdict(finding) for finding in findings]
        content = {
            "run": provenance.content(view),
            "anchors": anchors,
            "findings": found_json,
            "counts": counts,
        }
        options.json.write_json(content)
    return ExitCode.FAILED if counts["errors"] else ExitCode.DONE


def _store(text: str) -> str:
    from pydantic import ValidationError

    from fp8core.config.run import TrackingConfig

    try:
        TrackingConfig(uri=None if text == "none" else text)
    except ValidationError:
        expected = "none, http(s)://HOST or a database, as sqlite:///FILE"
        raise argparse.ArgumentTypeError(f"expected {expected}, found {without_passwords(text)!r}") from None
    return text


def _anchors(view: "RunView", links: "Chain", store: str | None) -> "tuple[dict[str, str], list[Finding]]":
    from flows.environment import bound_mlflow_requests
    from flows.tracking.chain_head import compare_with_mlflow
    from flows.tracking.store import quiet_store_logs
    from fp8core.store.run_view import Finding

    bound_mlflow_requests()
    quiet_store_logs()
    said: list[tuple[str, str | Finding]] = []
    if store != "none":
        said.append(("MLflow", compare_with_mlflow(view, links, store)))
    lines = {name: line for name, line in said if isinstance(line, str)}
    return lines, [line for _, line in said if isinstance(line, Finding)]
