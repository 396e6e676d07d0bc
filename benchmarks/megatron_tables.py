"""Print the tables of docs/megatron.md about Hopper GPUs, from the stored results: speed, parity and small deployments.

    python -m benchmarks.megatron_tables

Reads the rows of `megatron_hopper.py` and `deployment_hopper.py` in benchmarks/results; each holds its commit and
versions.
"""

import json

from benchmarks.stored import MODELS, RESULTS, Row

_PRECISIONS = {"bf16": "BF16", "fp8": "block FP8"}


def main() -> None:
    rows: list[Row] = json.loads((RESULTS / "megatron_hopper.json").read_text())
    deployments: list[Row] = json.loads((RESULTS / "deployment_hopper.json").read_text())["rows"]
    print(speed_table(rows), parity_table(rows), deployment_table(deployments), sep="\n\n")


def speed_table(rows: list[Row]) -> str:
    """Tokens per second of whole steps and of scoring, beside BF16 of the same layers."""
    lines = ["| model | layers | precision | a step, tokens/s | to BF16 | scoring, tokens/s | peak, GiB |"]
    lines.append("| --- " * 7 + "|")
    timed = [row for row in rows if row["kind"] == "training"]
    base = {row["model"]: row["step_tokens_per_second"] for row in timed if row["precision"] == "bf16"}
    for row in timed:
        speed, scored = row["step_tokens_per_second"], row["logprob_tokens_per_second"]
        ratio = f"{speed / base[row['model']]:.2f}x" if row["model"] in base else "not measured"
        cells = f"{_PRECISIONS[row['precision']]} | {speed:,.0f} | {ratio} | {scored:,.0f} | {row['peak_gib']:.0f}"
        lines.append(f"| {MODELS.get(row['model'], row['model'])} | {row['layers']} | {cells} |")
    return "\n".join(lines)


def parity_table(rows: list[Row]) -> str:
    """Differences in log-probs, loss and gradients on equal weights and tokens."""
    lines = ["| model | precision | against | log-probs, mean, nats | largest | loss | gradients, relative |"]
    lines.append("| --- " * 7 + "|")
    for row in (row for row in rows if row["kind"] == "trainer_parity"):
        gradients = f"{row['gradient_relative']:.4f}" if row["gradients_compared"] else "not told"
        cells = f"{row['logprob_mean']:.4f} | {row['logprob_max']:.4f} | {row['loss_difference']:.5f} | {gradients}"
        lines.append(f"| {row['model']} | {_PRECISIONS[row['precision']]} | {row['against']} | {cells} |")
    return "\n".join(lines)


def deployment_table(rows: list[Row]) -> str:
    """How deployments of small models ended, their error, and the seconds of their tasks in all steps."""
    tasks = ("rollout", "logprobs", "train", "sync")
    lines = [f"| deployment | grid | steps | ended | error, largest | {', '.join(tasks)}, s |", "| --- " * 6 + "|"]
    for row in rows:
        seconds = ", ".join(f"{row['task_seconds'][task]:.1f}" for task in tasks)
        ended = "completed" if row["state"] == "COMPLETED" else row["message"]
        cells = f"{row['steps']} | {ended} | {max(row['tmpe']):.4f} | {seconds}"
        lines.append(f"| {row['config']} | {row['grid']} | {cells} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
