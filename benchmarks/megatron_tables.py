"""Print the tables of docs/megatron.md about speed and parity on a Hopper GPU, from the stored results.

    python -m benchmarks.megatron_tables

Reads benchmarks/results/megatron_hopper.json, the rows of `megatron_hopper.py`; each holds its commit and versions.
"""

import json

from benchmarks.hopper_tables import MODELS, RESULTS, Row

_PRECISIONS = {"bf16": "BF16", "fp8": "block FP8"}


def main() -> None:
    rows: list[Row] = json.loads((RESULTS / "megatron_hopper.json").read_text())
    print(speed_table(rows), parity_table(rows), sep="\n\n")


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


if __name__ == "__main__":
    main()
