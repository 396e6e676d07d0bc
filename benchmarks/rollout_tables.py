"""Tables of rollouts and of decode steps, which `hopper_tables.py` prints.

Rows are taken as `rollout_hopper.py` and `vllm_moe_hopper.py` write them; other kinds may be among them.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.stored import MODELS, PRECISIONS, Row

DECODERS = {"fp8_decode": "ours", "flash_attention": "FlashAttention 3"}


def rollout_table(rows: Sequence[Row]) -> str:
    """Tokens per second, beside BF16 of the same requests where as many tokens fit into a step."""
    lines = ["| shape | precision | decodes with | tokens a step | tokens/s | to BF16 | of |", "| --- " * 7 + "|"]
    timed = [row for row in rows if row["kind"] == "rollout"]
    base = {_compared(row): row["tokens_per_s"] for row in timed if row["precision"] == "bf16"}
    for row in timed:
        speed = row["tokens_per_s"]
        ratio = f"{speed / base[_compared(row)]:.2f}x" if _compared(row) in base else "not measured"
        spread = ", ".join(f"{one:,.0f}" for one in row.get("all_tokens_per_s", [speed]))
        numbers = f"{row['batched_tokens']:,} | {speed:,.0f} | {ratio} | {spread}"
        lines.append(f"| {_shape(row)} | {_words(row)} | {DECODERS[row['decode_kernel']]} | {numbers} |")
    return "\n".join(lines)


def run_table(rows: Sequence[Row]) -> str:
    """Why a run is slow: its steps by quarter, and who was busy. Empty where no row has its runs."""
    lines = [
        "| a run | tokens/s | median step by quarter, ms | largest, ms | garbage collector: all (longest), ms | "
        "processors: all (busiest thread) |",
        "| --- " * 6 + "|",
    ]
    timed = [row for row in rows if row["kind"] == "rollout" and "runs" in row]
    for row in timed:
        about = f"{_shape(row)}, {_words(row)}, {DECODERS[row['decode_kernel']]}, commit {row['commit'][:7]}"
        for number, run in enumerate(row["runs"], 1):
            lines.append(f"| {about}, run {number} | {_why(run)} |")
    return "\n".join(lines) if timed else ""


def trace_tables(rows: Sequence[Row]) -> list[str]:
    """Milliseconds of a decode step, by part: a table for each trace."""
    traces = [row for row in rows if row["kind"] == "decode_trace"]
    return [_trace_table(row, title) for row, title in zip(traces, _titles(traces), strict=True)]


def _compared(row: Row) -> tuple[str, int]:
    return _shape(row), row["batched_tokens"]


def _shape(row: Row) -> str:
    lengths = f"up to {row['generated']}, most far shorter" if row["long_tailed"] else row["generated"]
    return f"{MODELS[row['model']]}, {row['requests']} x ({row['prompt']} + {lengths})"


def _words(row: Row) -> str:
    """The precision, and what else differs from the engine that is taken without a word."""
    told = {
        "batch-invariant": row["batch_invariant"],
        # Rows from before there was a choice are of vLLM's own model.
        "aligned": row.get("forward") == "aligned",
        f"pages of {row.get('block_size')}": row.get("block_size") is not None,
        "experts by Triton": row.get("experts") == "triton",
        "ready for routes": row.get("routes") and not row.get("routes_reported"),
        "routes reported": row.get("routes_reported"),
    }
    variables = [f"{name}={value}" for name, value in row.get("variables", {}).items()]
    return ", ".join([PRECISIONS[row["precision"]], *(words for words, holds in told.items() if holds), *variables])


def _why(run: Row) -> str:
    steps = [", ".join(f"{quarter[name]:.1f}" for quarter in run["step_ms"]) for name in ("median", "max")]
    busy = [f"{row['process']} {row['all']:.2f} ({max(row['threads'], default=0.0):.2f})" for row in run["processors"]]
    # Rows from before it was listened to have none.
    collected = f"{run['collections']['all']:,.0f} ({run['collections']['max']:,.0f})" if "collections" in run else ""
    return f"{run['tokens_per_s']:,.0f} | {' | '.join(steps)} | {collected} | {', '.join(busy)}"


def _titles(traces: Sequence[Row]) -> list[str]:
    """Of each trace the step, and of its engine what is not the same for all of them."""
    engines = [_engine(row) for row in traces]
    told = [len(set(words)) > 1 for words in zip(*engines, strict=True)]
    titles = [
        ", ".join([_step(row), *(word for word, differs in zip(engine, told, strict=True) if differs)])
        for row, engine in zip(traces, engines, strict=True)
    ]
    seen = Counter(titles)
    return [
        f"{title}, commit {row['commit'][:7]}" if seen[title] > 1 else title
        for row, title in zip(traces, titles, strict=True)
    ]


def _step(row: Row) -> str:
    return f"one decode step, {row['requests']} requests at {row['context']:,} tokens"


def _engine(row: Row) -> tuple[Any, ...]:
    forward = f"{row.get('forward', 'stock')} forward"
    return MODELS[row["model"]], PRECISIONS[row["precision"]], forward, f"decoded by {DECODERS[row['decode_kernel']]}"


def _trace_table(row: Row, title: str) -> str:
    lines = [f"| {title} | ms | share |", "| --- " * 3 + "|"]
    for part, milliseconds in sorted(row["parts_ms"].items(), key=lambda item: -item[1]):
        lines.append(f"| {part} | {milliseconds:.2f} | {milliseconds / row['step_ms']:.1%} |")
    lines.append(f"| nothing runs | {row['idle_ms']:.2f} | {row['idle_ms'] / row['step_ms']:.1%} |")
    return "\n".join([*lines, f"| all | {row['step_ms']:.2f} | 100.0% |"])
