"""The rows of small_hopper as the tables of docs/performance.md.

python -m benchmarks.small_tables FOLDER/small_hopper.json
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.small_rows import WALL, Row

_ALIGNMENT = {
    "error, median": ("tmpe_median", ".5f"),
    "error, largest": ("tmpe_max", ".5f"),
    "k3": ("k3_kl", ".2e"),
    "p99 of abs(d)": ("p99_abs_diff", ".2e"),
    "held-out, first": ("heldout_first", ".3f"),
    "held-out, last": ("heldout_last", ".3f"),
    "reward, first": ("reward_first", ".3f"),
    "reward, last": ("reward_last", ".3f"),
    "steps": ("steps", "d"),
}
# Generation and training, log-probs included.
_WORK = ("rollout", "logprobs", "train")


def main() -> None:
    print(*tables(json.loads(Path(sys.argv[1]).read_text())["rows"]), sep="\n\n")


def tables(rows: Sequence[Row]) -> Iterator[str]:
    """Alignment and learning, seconds of runs, of a step, and of its artifacts; of what there are rows."""
    found = [row for row in rows if row["kind"] == "alignment"]
    if found:
        yield alignment_table(found)
        yield seconds_table(found)
    found = [row for row in rows if row["kind"] == "step_ledger"]
    if found:
        yield ledger_table(found)
    # Rows of earlier runs do not say it.
    found = [row for row in found if "artifacts" in row]
    if found:
        yield artifacts_table(found)


def alignment_table(rows: Sequence[Row]) -> str:
    """A line for each variant."""
    lines = [_line("variant", *_ALIGNMENT), _rule(1 + len(_ALIGNMENT))]
    return "\n".join(
        [*lines, *(_line(row["variant"], *(f"{row[key]:{form}}" for key, form in _ALIGNMENT.values())) for row in rows)]
    )


def seconds_table(rows: Sequence[Row]) -> str:
    """Seconds of whole runs by task."""
    names = list(dict.fromkeys(name for row in rows for name in row["seconds"]))
    lines = [_line("seconds of a run", *names), _rule(1 + len(names))]
    for row in rows:
        lines.append(_line(row["variant"], *(f"{row['seconds'].get(name, 0.0):.1f}" for name in names)))
    return "\n".join(lines)


def ledger_table(rows: Sequence[Row]) -> str:
    """Mean milliseconds of a step by part, each with its percentage of the step; `rest` is all that is not _WORK.

    Parts that run side by side count in full, so that those outside _WORK may add up to more than the rest.
    """
    names = list(dict.fromkeys(name for row in rows for name in row["seconds"] if name != WALL))
    lines = [_line("ms of a step", *names, "whole", "rest", "steps"), _rule(4 + len(names))]
    for row in rows:
        seconds, whole = row["seconds"], row["seconds"][WALL]
        rest = whole - sum(seconds[name] for name in _WORK)
        cells = [_share(seconds.get(name, 0.0), whole) for name in names]
        lines.append(_line(row["variant"], *cells, f"{1000 * whole:.0f}", _share(rest, whole), str(row["steps"])))
    return "\n".join(lines)


def artifacts_table(rows: Sequence[Row]) -> str:
    """Mean milliseconds of a step's artifacts by task."""
    names = list(dict.fromkeys(name for row in rows for name in row["artifacts"]))
    lines = [_line("ms of a step's artifacts", *names), _rule(1 + len(names))]
    for row in rows:
        lines.append(_line(row["variant"], *(f"{1000 * row['artifacts'].get(name, 0.0):.0f}" for name in names)))
    return "\n".join(lines)


def _share(seconds: float, whole: float) -> str:
    return f"{1000 * seconds:.0f} ({100 * seconds / whole:.1f} %)"


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _rule(columns: int) -> str:
    return f"|{' --- |' * columns}"


if __name__ == "__main__":
    main()
