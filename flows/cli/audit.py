"""Commands on stored runs, which may be live: `verify`, `compare` and `replay` only read; `gc` removes."""

import argparse
import sys
import time
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.cli.arguments import add_output, add_overrides, add_trust, at_least
from flows.environment import bound_mlflow_requests, set_engine_variables
from flows.launch import long_part, say
from flows.run_lookup import admit_code, description_of, enter_origin, find_run
from flows.termination import ExitCode
from fp8core.errors import UserError, printable

if TYPE_CHECKING:
    from fp8core.config.run import KeepConfig
    from fp8core.run.replay import ReplayResult
    from fp8core.store.diff import Comparison
    from fp8core.store.gc import Removal
    from fp8core.store.manifest import StepManifest
    from fp8core.store.run_view import Finding, RunView


def add_commands(commands: Any) -> None:
    parser = commands.add_parser("verify", help="check every digest of a run and the chain of its steps")
    parser.add_argument("run", metavar="RUN", help="a run (name or folder)")
    add_output(parser, "--json", "write run, findings and counts as JSON")
    parser.set_defaults(command=verify_run)
    parser = commands.add_parser("compare", help="name the first difference between two runs")
    parser.add_argument("runs", metavar="RUN", nargs=2, help="two runs (names or folders)")
    add_output(parser, "--json", "write the comparison as JSON")
    parser.set_defaults(command=compare_runs)
    _add_replay(commands)
    parser = commands.add_parser("gc", help="list what artifacts.keep does not keep of a run, and remove it with --yes")
    parser.add_argument("run", metavar="RUN", help="a run: its folder, or a name below ./runs")
    parser.add_argument("--yes", action="store_true", help="remove what is listed")
    add_overrides(parser, "change what the run was to keep, as in --set 'artifacts.keep={last: 2, every: 10}'")
    parser.set_defaults(command=collect)


def _add_replay(commands: Any) -> None:
    parser = commands.add_parser("replay", help="make steps of a run again and compare them with what is stored")
    parser.add_argument("run", metavar="RUN", help="a run (name or folder); it is only read, and may be live")
    which, step = parser.add_mutually_exclusive_group(required=True), at_least(0)
    which.add_argument("--step", type=step, metavar="N", help="the step; 0 is the warm start and first evaluation")
    which.add_argument("--from", type=step, dest="first", metavar="N", help="this step and all after it")
    add_trust(parser)
    add_output(parser, "--json", "write the results as JSON")
    parser.set_defaults(command=replay_steps)


def verify_run(options: argparse.Namespace) -> int:
    from flows.tracking.chain_tip import compare_tip, published_tip
    from flows.tracking.store import quiet_store_logs
    from fp8core.run.verify import verified_bytes, verify
    from fp8core.store.manifest import record_digest
    from fp8core.store.run_view import Provenance, RunView

    began, read, folder = time.perf_counter(), 0, find_run(options.run)
    bound_mlflow_requests()
    quiet_store_logs()
    # Before the folder is read: a live run commits more meanwhile.
    mlflow_tip = published_tip(folder)
    view, provenance, links = RunView.read(folder), Provenance(), dict[int, str]()

    def report(more: int) -> None:
        nonlocal read
        read += more
        progress(read >> 20, size >> 20)

    def watch(manifest: "StepManifest") -> None:
        provenance.add(manifest)
        links[manifest.record.step] = record_digest(manifest)

    size = verified_bytes(view)
    with long_part("MiB verified") as progress:
        findings = list(verify(view, report, watch))
    comparison = compare_tip(mlflow_tip, links)
    say(provenance.text(view))
    if isinstance(comparison, str):
        say(f"{'MLflow':<16}{comparison}")
    else:
        findings.append(comparison)
    for finding in findings:
        say(finding)
    counts = _counts(view, findings) | {"bytes": read, "seconds": time.perf_counter() - began}
    removed_count = ", {removed} removed" if counts["removed"] else ""
    say(
        f"verified: {{steps}} steps with the start, {{artifacts}} artifacts{removed_count}, {{bytes:,}} bytes, "
        "{seconds:.1f} s; errors: {errors}, notes: {notes}".format(**counts)
    )
    if options.json is not None:
        content = {
            "run": provenance.lines(view),
            "anchors": {"MLflow": comparison} if isinstance(comparison, str) else {},
            "findings": [asdict(finding) for finding in findings],
            "counts": counts,
        }
        options.json.write_json(content)
    return ExitCode.FAILED if counts["errors"] else ExitCode.DONE


def _counts(view: "RunView", findings: "list[Finding]") -> dict[str, float]:
    from fp8core.run.verify import references

    digests = {reference.ref.uri: reference.ref.digest for reference in references(view)}
    absent = {uri for uri in digests if not (view.folder / uri).is_file()}
    return {
        "steps": len(view.steps),
        "artifacts": len(digests) - len(absent),
        "removed": sum(digests[uri] in view.removed_digests for uri in absent),
        "errors": sum(finding.severity == "error" for finding in findings),
        "notes": sum(finding.severity == "note" for finding in findings),
    }


def compare_runs(options: argparse.Namespace) -> int:
    from fp8core.store.diff import compare
    from fp8core.store.run_view import RunView

    comparison = compare(*(RunView.read(find_run(run)) for run in options.runs))
    say(comparison_text(comparison))
    if options.json is not None:
        options.json.write_json({"equal": comparison.equal, **asdict(comparison)})
    return ExitCode.DONE if comparison.equal else ExitCode.FAILED


def comparison_text(comparison: "Comparison") -> str:
    lines = [f"configuration  {difference}" for difference in comparison.configuration]
    lines += [f"circumstances  {difference} (from step {step})" for step, difference in comparison.circumstances]
    if comparison.first_step is not None:
        lines.append("first field    step {}: {}".format(*comparison.first_step))
    if comparison.first_metric is not None:
        lines.append("first metric   step {}: {}".format(*comparison.first_metric))
    lines += [f"note           {difference}" for difference in comparison.notes]
    if comparison.last[0] != comparison.last[1]:
        lines.append("note           the last committed steps are {} and {}".format(*comparison.last))
    steps = f"steps {comparison.common[0]} to {comparison.common[-1]}"
    if comparison.equal:
        conclusion = f"equal: {steps}"
    elif comparison.first_step is None:
        conclusion = f"different: not in what {steps} computed"
    else:
        conclusion = f"different: from step {comparison.first_step[0]} on"
    return "\n".join([*lines, conclusion])


def replay_steps(options: argparse.Namespace) -> int:
    from fp8core.report.console import Console
    from fp8core.run.replay import RunSnapshot, replay

    folder, here = find_run(options.run), Path.cwd()
    enter_origin(folder)
    admit_code(folder, (), here, trust=options.trust)
    original = RunSnapshot.read(folder)
    first, last = (
        (options.step, options.step) if options.first is None else (options.first, original.ledger.last_step())
    )
    if last is None or last < first:
        raise UserError(f"--from {first}: the last step is {last}")
    original.check_step(first)
    set_engine_variables(original.config(first))
    results = list["ReplayResult"]()
    for result in replay(original, range(first, last + 1), Console(sys.stderr, last)):
        say("\n".join(replay_lines(result)))
        results.append(result)
    equal = results[-1].outcome != "different"
    if options.json is not None:
        content = {"equal": equal, "steps": [asdict(result) for result in results]}
        options.json.write_json(content)
    return ExitCode.DONE if equal else ExitCode.FAILED


def replay_lines(result: "ReplayResult") -> list[str]:
    words = {"equal": "equal", "within": "equal within the bounds", "different": "different"}
    cost = f"{result.level}; {result.artifacts} artifacts, {result.seconds:.1f} s"
    lines = [f"step {result.step}: {words[result.outcome]} ({cost})", *result.causes]
    labels = ("largest difference" if result.outcome == "within" else "first difference", "there")
    lines += [f"{label}: {text}" for label, text in zip(labels, result.difference, strict=False)]
    return [lines[0], *(f"  {line}" for line in lines[1:])]


def collect(options: argparse.Namespace) -> int:
    """Raises UserError: a setting is none of `artifacts.keep`, a process has the run, or as `plan_removal`."""
    from flows.tracking.record import read_record
    from fp8core.config.load import reload_config
    from fp8core.store.gc import plan_removal, remove
    from fp8core.store.layout import LOCK
    from fp8core.store.lock import RunLock

    folder = find_run(options.run)
    for setting in options.overrides:
        if not f"{setting.partition('=')[0]}.".startswith("artifacts.keep."):
            raise UserError(f"--set {setting}: gc takes settings of artifacts.keep alone")
    config = reload_config(description_of(folder).config, options.overrides)
    keep = config.artifacts.keep
    lock = RunLock.acquire(folder / LOCK)
    try:
        record = read_record(folder)
        services_by_name = {} if record is None else record.services
        services = [services_by_name[service] for service in config.tracking.services if service in services_by_name]
        last_published = min((service.published for service in services), default=None)
        removal = plan_removal(folder, keep, last_published, config.pipeline.reach)
        say(removal_text(keep, removal))
        if options.yes:
            remove(folder, removal)
        if removal.files:
            total = f"{len(removal.files):,} files, {sum(each.size for each in removal.files):,} bytes"
            say(f"removed {total}" if options.yes else f"nothing was removed yet: --yes removes {total}")
    finally:
        lock.release()
    return ExitCode.DONE


def removal_text(keep: "KeepConfig | None", removal: "Removal") -> str:
    from fp8core.store.run_view import spans

    sizes: dict[str, int] = defaultdict(int)
    for each in removal.files:
        sizes[each.kind] += each.size
    return "\n".join(
        [
            f"artifacts.keep: {'every step' if keep is None else keep.model_dump_json(exclude_none=True)}",
            f"steps kept:     {spans(removal.remaining_steps) or 'none'}",
            f"steps dropped:  {spans(removal.dropped_steps) or 'none'}",
            *(f"bytes of {kind}: {size:,}" for kind, size in sorted(sizes.items())),
            *(printable(each.uri) for each in removal.files),
        ]
    )
