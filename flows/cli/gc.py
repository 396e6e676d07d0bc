"""`fp8-grpo gc`: list what a run need not keep, and remove it with --yes."""

import argparse
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from flows.cli.arguments import add_overrides
from flows.launch import say
from flows.termination import ExitCode
from fp8core.errors import UserError, printable

if TYPE_CHECKING:
    from fp8core.config.run import KeepConfig
    from fp8core.store.gc import Removal


def add_command(commands: Any) -> None:
    parser = commands.add_parser("gc", help="list what artifacts.keep does not keep of a run, and remove it with --yes")
    parser.add_argument("run", metavar="RUN", help="a run: its folder, or a name below ./runs")
    parser.add_argument("--yes", action="store_true", help="remove what is listed")
    add_overrides(parser, "change what the run was to keep, as in --set 'artifacts.keep={last: 2, every: 10}'")
    parser.set_defaults(command=collect)


def collect(options: argparse.Namespace) -> int:
    """List, and remove when asked to; returns the exit code.

    Raises:
        UserError: a setting is none of `artifacts.keep`, a process has the run, or as `plan_removal` and `remove`.
    """
    from flows.run_lookup import description_of, find_run
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
        tracked = read_record(folder)
        published = None if tracked is None else tracked.published
        removal = plan_removal(folder, keep, published, config.pipeline.reach)
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

    kinds: dict[str, list[int]] = defaultdict(list)
    for each in removal.files:
        kinds[each.kind].append(each.size)
    everything = [size for sizes in kinds.values() for size in sizes]
    rows = [(kind, len(sizes), sum(sizes)) for kind, sizes in sorted(kinds.items())]
    rows.append(("in all", len(everything), sum(everything)))
    width = max(len(kind) for kind, _, _ in rows)
    return "\n".join(
        [
            f"artifacts.keep: {'every step' if keep is None else keep.model_dump_json(exclude_none=True)}",
            f"steps kept:     {spans(removal.kept) or 'none'}",
            f"steps dropped:  {spans(removal.dropped) or 'none'}",
            "",
            f"{'to remove':{width}}  {'files':>7}  {'bytes':>15}",
            *(f"{kind:{width}}  {files:7,}  {size:15,}" for kind, files, size in rows),
            *(printable(each.uri) for each in removal.files),
        ]
    )
