"""Print the tables of docs/performance.md about training on a Hopper GPU, from the stored results.

    python -m benchmarks.training_tables

Reads benchmarks/results/training_hopper.json, training_widths_hopper.json and fused_hopper.json; each row holds its
commit and versions.
"""

from benchmarks import stored
from benchmarks.stored import Row

MODELS = stored.MODELS | {"small": "110M, 12 layers of width 768"}
_WORDS = stored.PRECISIONS
PRECISIONS = {"bf16": _WORDS["bf16"], "fp8_block": _WORDS["fp8_linear"], "fp8_block_kv": _WORDS["fp8_linear_kv"]}


def main() -> None:
    names = ("training_hopper", "training_widths_hopper", "fused_hopper")
    training, widths, fused = (stored.stored(name) for name in names)
    print(speed_table(training), parts_table(training), width_table(widths), fused_table(fused), sep="\n\n")


def speed_table(rows: list[Row]) -> str:
    """Tokens per second of full steps, beside BF16 of the same model and layers."""
    lines = [
        "| a step of 65,536 tokens | precision | layers | tokens/s | to BF16 | MFU | peak, GB |",
        "| --- " * 7 + "|",
    ]
    timed = [row for row in rows if row["kind"] == "training"]
    base = {_same(row): row["tokens_per_s"] for row in timed if row["precision"] == "bf16"}
    for row in timed:
        words = PRECISIONS[row["precision"]] + (", deterministic" if row["deterministic"] else "")
        ratio = f"{row['tokens_per_s'] / base[_same(row)]:.2f}x" if _same(row) in base else "not measured"
        cells = f"{row['layers']} | {row['tokens_per_s']:,.0f} | {ratio} | {row['mfu']:.1%} | {row['peak_gb']:.0f}"
        lines.append(f"| {MODELS.get(row['model'], row['model'])} | {words} | {cells} |")
    return "\n".join(lines)


def parts_table(rows: list[Row], model: str = "qwen3-8b") -> str:
    """Milliseconds of GPU time of a step by part, one column a precision."""
    of_model = (row for row in rows if row["kind"] == "training_trace" and row["model"] == model)
    traces = {row["precision"]: row for row in of_model if not row["deterministic"]}
    parts = dict.fromkeys(part for row in traces.values() for part in row["parts_ms"])
    lines = [f"| {MODELS[model]}, ms of a step | {' | '.join(PRECISIONS[name] for name in traces)} |"]
    lines.append("| --- " * (1 + len(traces)) + "|")
    for part in sorted(parts, key=lambda part: -max(row["parts_ms"].get(part, 0.0) for row in traces.values())):
        lines.append(
            f"| {part} | {' | '.join(_milliseconds(row['parts_ms'].get(part, 0.0)) for row in traces.values())} |"
        )
    whole = (_milliseconds(1000 * row["traced_seconds"]) for row in traces.values())
    return "\n".join([*lines, f"| whole step | {' | '.join(whole)} |"])


def width_table(rows: list[Row]) -> str:
    """Whole steps by the width of the model, and what the GPU computes of them: from where FP8 pays."""
    lines = [
        "| a step of 65,536 tokens | BF16, ms | FP8 linears, ms | BF16 to FP8 | "
        "of it the GPU computes: BF16, ms | GPU: FP8 linears, ms | GPU: BF16 to FP8 |",
        "| --- " * 7 + "|",
    ]
    whole, computed = dict[str, dict[str, float]](), dict[str, dict[str, float]]()
    for row in rows:
        if row["kind"] == "training":
            whole.setdefault(row["model"], {})[row["precision"]] = 1000 * row["seconds"]
        elif row["kind"] == "training_trace":
            computed.setdefault(row["model"], {})[row["precision"]] = sum(row["parts_ms"].values())
    for model, of in whole.items():
        words = MODELS.get(model) or f"8 layers of width {model.removeprefix('width-')}"
        lines.append(f"| {words} | {_compared(of)} | {_compared(computed[model])} |")
    return "\n".join(lines)


def _compared(of: dict[str, float]) -> str:
    return f"{of['bf16']:,.0f} | {of['fp8_block']:,.0f} | {of['bf16'] / of['fp8_block']:.2f}x"


def fused_table(rows: list[Row]) -> str:
    """Microseconds of each function, fused and as what it replaces, beside the prediction."""
    lines = ["| 16,384 tokens of Qwen3-8B | predicted, us | fused, us | GB/s | two kernels, us | torch, us |"]
    lines.append("| --- " * 6 + "|")
    forms: dict[str, dict[str, Row]] = {}
    for row in rows:
        forms.setdefault(row["function"], {})[row["form"]] = row
    for function, found in forms.items():
        fused = found["fused"]
        others = (f"{found[form]['microseconds']:,.0f}" if form in found else "" for form in ("two kernels", "torch"))
        own = f"{fused['predicted_microseconds']:,} | {fused['microseconds']:,.0f} | {fused['gb_per_s']:,.0f}"
        lines.append(f"| {function} | {own} | {' | '.join(others)} |")
    return "\n".join(lines)


def _same(row: Row) -> tuple[str, int, bool]:
    return row["model"], row["layers"], row["checkpointing"]


def _milliseconds(value: float) -> str:
    return f"{value:,.0f}"


if __name__ == "__main__":
    main()
