"""Draw the versions that wrote the tokens of a run that generates ahead: a line a completion, a colour a version.

    fp8-grpo run tiny --set run=versions --set steps=8 --set warm_start.steps=120 --set rollout.prompts_per_step=5 \
        --set rollout.group_size=4 --set pipeline.mode=asynchronous --set pipeline.max_staleness=3 \
        --set pipeline.ahead_tokens=2 --set pipeline.max_inflight_prompts=7
    python docs/versions.py runs/versions 4 6

Reads the column `versions` of the run's rollouts and nothing else, and writes docs/images/versions.svg.
"""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch

from fp8core.report.chart import colour
from fp8core.store.artifacts import ArtifactStore
from fp8core.store.layout import LEDGER
from fp8core.store.ledger import LedgerView

IMAGE = Path(__file__).parent / "images" / "versions.svg"
GAP = 1.5
LINE = 0.11
"""Height of a completion, in inches."""


def main() -> None:
    run, first, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    rows = {step: versions_of(run, step) for step in range(first, last + 1)}
    seen = sorted({version for step in rows.values() for row in step for version in row})
    height = sum(len(step) + GAP for step in rows.values())
    matplotlib.rcParams.update({"svg.hashsalt": "fp8-grpo", "font.size": 9})
    figure, axes = plt.subplots(figsize=(7.5, 1 + LINE * height), layout="constrained")
    y = 0.0
    for step, completions in rows.items():
        middle = y + (len(completions) - 1) / 2
        axes.text(-0.3, middle, f"step {step}\nlearns\nfrom", ha="right", va="center")
        for versions in completions:
            for position, version in enumerate(versions):
                axes.barh(y, 1, 0.8, position, align="center", color=colour(version), edgecolor="white", linewidth=0.6)
            y += 1
        y += GAP
    axes.set_ylim(y - GAP, -1)
    axes.set_xlim(0, max(len(row) for step in rows.values() for row in step) + 0.2)
    axes.set_xlabel("position of the token in its completion")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_yticks([])
    axes.spines[["top", "right", "left"]].set_visible(False)
    names = [Patch(color=colour(version), label=f"version {version}") for version in seen]
    axes.legend(handles=names, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(names), frameon=False)
    figure.savefig(IMAGE, metadata={"Date": None}, facecolor="white")


def versions_of(run: Path, step: int) -> list[list[int]]:
    """The version of each token, a list a completion, in the order in which their prompts entered."""
    rollouts = LedgerView.read(run / LEDGER).artifacts(step)["rollouts"]
    found: list[list[int]] = ArtifactStore(run).get_table(rollouts, ["versions"])["versions"].to_pylist()
    return found


if __name__ == "__main__":
    main()
