"""The whole loop of h200-small on one GPU and on several through Ray: error, differing tokens, seconds by part.

    python -m benchmarks.cluster_hopper --out FOLDER --gpus 2 --steps 8
    python -m benchmarks.cluster_hopper --out FOLDER --gpus 2 --steps 8 --nodes 2

With --nodes a Ray cluster of simulated nodes on this host shares the GPUs out, and the runs are given its address. So
one GPU goes through Ray too. All cases begin from one warm start. Each is a row of kind `grpo_step` in
FOLDER/cluster_hopper.json. The rollouts of step 1 come from the same policy in all cases, so their digests must be
equal.
"""

import argparse
import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import ROOT, Row, provenance, table, training_command, write_rows
from fp8core.store.artifacts import ArtifactStore
from fp8core.store.layout import LEDGER, SUMMARY
from fp8core.store.ledger import LedgerView

RESULT = "cluster_hopper"
_PARTS = ("rollout", "logprobs", "train", "sync")
# Engines compile in the first steps.
_WARM_UP = 2
_SECONDS = 550


def cases(gpus: int) -> dict[str, Mapping[str, Any]]:
    """Settings of the cluster, by the name of a case."""
    if gpus == 1:
        return {"one process": {}, "colocated, 1": {"cluster.engines": 1, "cluster.ranks": 1}}
    return {
        "one process": {},
        f"colocated, {gpus}": {"cluster.engines": gpus, "cluster.ranks": gpus},
        f"separate, {gpus - gpus // 2} + {gpus // 2}": {
            "cluster.placement": "separate",
            "cluster.engines": gpus - gpus // 2,
            "cluster.ranks": gpus // 2,
        },
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases one after another; returns 0 when every one of them ended."""
    options = _options(arguments)
    out, rows = options.out.absolute(), list[Row]()
    (out / "logs").mkdir(parents=True, exist_ok=True)
    address = {} if not options.nodes else {"cluster.address": simulated_nodes(options.nodes, options.gpus)}
    chosen = cases(options.gpus)
    for name in options.case or chosen:
        settings = chosen[name]
        rows.append(_measured(name, {**settings, **address} if settings else settings, options, out))
        write_rows(out / f"{RESULT}.json", rows)
    print(step_table(rows), flush=True)
    return int(any("error" in row for row in rows))


def simulated_nodes(nodes: int, gpus: int) -> str:
    """The address of a cluster of this host whose nodes have a share of its GPUs each; it ends with this process."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "num_gpus": 0, "include_dashboard": False})
    for node in range(nodes):
        own = range(gpus * node // nodes, gpus * (node + 1) // nodes)
        # Each would number its GPUs from 0.
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, own))}
        cluster.add_node(num_cpus=4 * len(own), num_gpus=len(own), env_vars=visible)
    cluster.wait_for_nodes()
    return str(cluster.address)


def _measured(name: str, settings: Mapping[str, Any], options: argparse.Namespace, out: Path) -> Row:
    run = name.replace(",", "").replace(" ", "-").replace("+", "and")
    whole = {**settings, "steps": options.steps, "warm_start.steps": options.warm_start, "runs": str(out / "runs")}
    flags = [*(f"{key}={value}" for key, value in whole.items()), f"run={run}", *options.overrides]
    row: Row = {"kind": "grpo_step", "model": "h200-small", "layers": 8, "case": name, "mode": "synchronous"}
    row |= {"precision": "fp8_linear_kv", "settings": dict(settings), "steps": options.steps}
    row |= {"overrides": list(options.overrides), "nodes": options.nodes if "cluster.address" in settings else 1}
    log = out / "logs" / f"{run}.log"
    with log.open("wb") as output:
        ended = subprocess.run(
            training_command(options.config, flags), cwd=ROOT, stdout=output, stderr=output, timeout=_SECONDS
        )
    if ended.returncode:
        return row | provenance() | {"error": log.read_text(errors="replace")[-4000:]}
    return row | _steps(out / "runs" / run, settings) | provenance()


def _steps(folder: Path, settings: Mapping[str, Any]) -> Row:
    """Medians over the steps after the first ones, and what must be equal in all cases."""
    ledger, store = LedgerView.read(folder / LEDGER), ArtifactStore(folder)
    summary = json.loads((folder / SUMMARY).read_text())
    manifests = [store.get_json(ledger.steps()[step].manifest) for step in sorted(ledger.steps()) if step > _WARM_UP]
    timings = [manifest["observed"]["timings"] for manifest in manifests]
    seconds = {part: median(timing.get(part, 0.0) for timing in timings) for part in _PARTS}
    whole = median(sum(timing.values()) for timing in timings)
    metrics = [store.get_json(ledger.artifacts(step)["metrics"]) for step in sorted(ledger.steps())[1:]]
    separate = settings.get("cluster.placement") == "separate"
    engines, ranks = settings.get("cluster.engines", 1), settings.get("cluster.ranks", 1)
    gpus = engines + ranks if separate else max(engines, ranks)
    return {
        "gpus": gpus,
        "seconds": {**seconds, "tasks": whole},
        "tokens_per_s_per_gpu": median(each["rollout/tokens"] for each in metrics[_WARM_UP:]) / whole / gpus,
        "error_max": summary["tmpe_max"],
        "tokens_differing": summary["tokens_differing"],
        "rollouts_of_step_1": ledger.artifacts(1)["rollouts"].digest,
        "weights": summary["weights_digest"],
        "cluster": manifests[-1]["observed"]["cluster"],
    }


def step_table(rows: Sequence[Row]) -> str:
    """One line a case."""
    header = ("case", "GPUs", *(f"{part}, s" for part in (*_PARTS, "tasks")), "error", "rollouts of step 1")
    return table(
        header,
        (
            (
                ", ".join(_named(row)),
                str(row["gpus"]),
                *(f"{row['seconds'][part]:.3f}" for part in (*_PARTS, "tasks")),
                f"{row['error_max']:.6g}",
                row["rollouts_of_step_1"][:8],
            )
            for row in rows
            if "error" not in row
        ),
    )


def _named(row: Row) -> Iterator[str]:
    """Its case, and what is unlike in others of the same case."""
    yield row["case"]
    if row["nodes"] > 1:
        yield f"on {row['nodes']} nodes"
    # Rows of earlier runs have none.
    yield from row.get("overrides", [])


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the rows, the runs and their logs")
    parser.add_argument("--gpus", type=int, default=2, help="GPUs of the cases with several")
    parser.add_argument("--nodes", type=int, default=0, help="simulated nodes that share the GPUs out")
    parser.add_argument("--case", action="append", help="its name, as in the table; may be repeated (default: all)")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warm-start", type=int, default=600, help="steps of the warm start that all cases share")
    parser.add_argument("--config", default="h200-small")
    parser.add_argument("overrides", nargs="*", help="further settings, key=value")
    options = parser.parse_args(arguments)
    if unknown := {*(options.case or ())} - {*cases(options.gpus)}:
        parser.error(f"{', '.join(sorted(unknown))}: none of {'; '.join(cases(options.gpus))}")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
