"""Print the tables of the pages from stored rows; none measures what another prints.

    python -m benchmarks.tables [NAME ...]                                     all when none is named
    python -m benchmarks.tables --rows FILE.json loop                          from rows that are not stored yet
    python -m benchmarks.tables --rows runs/parity/NAME/verdict.json parity    of a run; --keep FILE stores its row

They are on the pages below docs/results. `engine` also prints when steps came and which processes were busy.
"""

import argparse
import itertools
import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.attention_forward import whole_attention_table
from benchmarks.cluster_hopper import step_table
from benchmarks.episodes_hopper import episode_tables
from benchmarks.harness import MODELS, PRECISIONS, Row, stored, table, write_rows
from benchmarks.rollout_hopper import prompt_table
from benchmarks.sglang_hopper import sglang_table
from benchmarks.verifier_speed import speed_tables

SHAPE = [16384, 4096]
DECODERS = {"fp8_decode": "ours", "flash_attention": "FlashAttention 3"}
WALL = "wall"
# The variant of `fused_hopper.VARIANTS` that the engine runs: keys of a partition, blocks a multiprocessor, stages.
_OURS = "ours 4096 3 2"
_EXACTNESS = {"exactness": "default", "exactness_invariant": "batch-invariant", "exactness_aligned": "aligned"}
_TRAINED = MODELS | {"small": "110M, 12 layers of width 768"}
_TRAINING = {
    "bf16": PRECISIONS["bf16"],
    "fp8_block": PRECISIONS["fp8_linear"],
    "fp8_block_kv": PRECISIONS["fp8_linear_kv"],
}
_MEGATRON = {"bf16": "BF16", "fp8": "block FP8"}
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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(TABLES))
    parser.add_argument("--rows", type=Path, help="for `loop` or `parity`, instead of what is stored")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="write the row of a parity run")
    options = parser.parse_args(arguments)
    if unknown := {*options.names} - {*TABLES}:
        parser.error(f"{', '.join(sorted(unknown))}: none of {', '.join(TABLES)}")
    if options.rows is not None:
        content = json.loads(options.rows.read_text())
        if options.names == ["parity"]:
            parity = content[0] if isinstance(content, list) else parity_row(content)
            print(parity_table(parity))
            if options.keep is not None:
                write_rows(options.keep, [parity])
        else:
            print(*loop_tables(content), sep="\n\n")
        return
    print(*(text for name in options.names or TABLES for text in TABLES[name]() if text), sep="\n\n")


def _of(rows: Iterable[Row], *kinds: str) -> list[Row]:
    return [row for row in rows if row["kind"] in kinds]


# Kernels


def quantiser_table(kernels: Sequence[Row]) -> str:
    """Quantisers of a BF16 [16384, 4096] tensor: ours beside others."""
    return table(
        ["quantiser, BF16 16384 x 4096", "rule", "microseconds", "GB/s", "codes that differ"],
        [
            [
                row["kernel"],
                row["rule"],
                f"{row['microseconds']:.0f}",
                f"{row['gb_per_s']:,.0f}",
                f"{row.get('codes_that_differ', 0):,}",
            ]
            for row in _of(kernels, "quantise", "peers", "compile")
            if row.get("shape") == SHAPE and row["dtype"] == "torch.bfloat16" and row["kernel"] != "copy"
        ],
    )


def fingerprint_table(kernels: Sequence[Row]) -> str:
    """Fingerprints of 8.2 GB in 325 tensors."""
    return table(
        ["fingerprint of 8.2 GB in 325 tensors", "milliseconds", "GB/s"],
        [
            [row["kernel"], f"{row['microseconds'] / 1000:.1f}", f"{row['gb_per_s']:,.0f}"]
            for row in _of(kernels, "fingerprint")
            if "microseconds" in row
        ],
    )


def attention_table(rows: Sequence[Row]) -> str:
    """FlashAttention 3's decode alone: bytes of the cache a second."""
    found = {(r["context"], r["page"], r["dtype"]): r for r in rows if r.get("splits") == 0}
    lines = []
    for context, page in sorted({key[:2] for key in found}):
        pair = (found[context, page, f"torch.{name}"] for name in ("bfloat16", "float8_e4m3fn"))
        numbers = [words for row in pair for words in (f"{row['microseconds']:.0f}", f"{row['gb_per_s']:,}")]
        lines.append([f"{context:,} tokens each", str(page), *numbers])
    return table(["FlashAttention 3, 256 requests", "page", "BF16, us", "GB/s", "FP8, us", "GB/s"], lines)


def decode_table(rows: Sequence[Row]) -> str:
    """One layer's attention of a decode step over a paged cache: ours beside FlashAttention 3's."""
    columns = (("flash", "bfloat16"), ("flash", "float8_e4m3fn"), (_OURS, "float8_e4m3fn"))
    cells: dict[tuple[int, int], dict[tuple[str, str], Row]] = {}
    for row in rows:
        if "splits" not in row:
            found = cells.setdefault((row["requests"], row["context"]), {})
            found[row["kernel"], row["dtype"].removeprefix("torch.")] = row
    lines = []
    for (requests, context), found in cells.items():
        numbers = [f"{found[key]['microseconds']:.0f} ({found[key]['gb_per_s']:,})" for key in columns]
        _, theirs, ours = (found[key]["microseconds"] for key in columns)
        lines.append([f"{requests} x {context:,}", *numbers, f"{theirs / ours:.2f}x"])
    header = ["requests x context", "FlashAttention 3, BF16, us (GB/s)", "FP8", "ours, FP8", "ours to FP8"]
    return table(header, lines)


def fused_table(rows: Sequence[Row]) -> str:
    """Microseconds of each function, fused and as what it replaces, beside the prediction."""
    forms: dict[str, dict[str, Row]] = {}
    for row in rows:
        forms.setdefault(row["function"], {})[row["form"]] = row
    return table(
        ["16,384 tokens of Qwen3-8B", "predicted, us", "fused, us", "GB/s", "two kernels, us", "torch, us"],
        [
            [
                function,
                f"{found['fused']['predicted_microseconds']:,}",
                f"{found['fused']['microseconds']:,.0f}",
                f"{found['fused']['gb_per_s']:,.0f}",
                *(f"{found[form]['microseconds']:,.0f}" if form in found else "" for form in ("two kernels", "torch")),
            ]
            for function, found in forms.items()
        ],
    )


# Rollouts


def rollout_table(rows: Sequence[Row]) -> str:
    """Tokens per second, beside BF16 of the same requests where as many tokens fit into a step."""
    timed = _of(rows, "rollout")
    base = {_compared(row): row["tokens_per_s"] for row in timed if row["precision"] == "bf16"}
    lines = []
    for row in timed:
        speed = row["tokens_per_s"]
        ratio = f"{speed / base[_compared(row)]:.2f}x" if _compared(row) in base else "not measured"
        spread = ", ".join(f"{one:,.0f}" for one in row.get("all_tokens_per_s", [speed]))
        engine = [_shape(row), _words(row), DECODERS[row["decode_kernel"]], f"{row['batched_tokens']:,}"]
        lines.append([*engine, f"{speed:,.0f}", ratio, spread])
    return table(["shape", "precision", "decodes with", "tokens a step", "tokens/s", "to BF16", "of"], lines)


def run_table(rows: Sequence[Row]) -> str:
    """Reasons why a run is slow: its steps by quarter, and the busy processes. Empty where no row has its runs."""
    header = ["a run", "tokens/s", "median step by quarter, ms", "largest, ms"]
    header += ["garbage collector: all (longest), ms", "processors: all (busiest thread)"]
    lines = [
        [f"{_shape(row)}, {_words(row)}, {DECODERS[row['decode_kernel']]}, commit {_commit(row)}, run {n}", *_why(run)]
        for row in _of(rows, "rollout")
        for n, run in enumerate(row.get("runs", ()), 1)
    ]
    return table(header, lines) if lines else ""


def _compared(row: Row) -> tuple[str, int]:
    return _shape(row), row["batched_tokens"]


def _commit(row: Row) -> str:
    return "unknown" if row["commit"] is None else str(row["commit"][:7])


def _shape(row: Row) -> str:
    lengths = f"up to {row['generated']}, most far shorter" if row["long_tailed"] else row["generated"]
    return f"{MODELS[row['model']]}, {row['requests']} x ({row['prompt']} + {lengths})"


def _words(row: Row) -> str:
    """The precision, and what else differs from the default engine."""
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


def _why(run: Row) -> list[str]:
    steps = [", ".join(f"{quarter[name]:.1f}" for quarter in run["step_ms"]) for name in ("median", "max")]
    busy = [f"{row['process']} {row['all']:.2f} ({max(row['threads'], default=0.0):.2f})" for row in run["processors"]]
    # Older rows have no collections.
    collected = f"{run['collections']['all']:,.0f} ({run['collections']['max']:,.0f})" if "collections" in run else ""
    return [f"{run['tokens_per_s']:,.0f}", *steps, collected, ", ".join(busy)]


def trace_tables(rows: Sequence[Row]) -> list[str]:
    """Milliseconds of a decode step, by part: a table for each trace."""
    traces = _of(rows, "decode_trace")
    return [_trace_table(row, title) for row, title in zip(traces, _titles(traces), strict=True)]


def _titles(traces: Sequence[Row]) -> list[str]:
    """Of each trace the step, and of its engine what is not the same for all of them."""
    engines = [_engine(row) for row in traces]
    told = [len(set(words)) > 1 for words in zip(*engines, strict=True)]
    titles = [
        ", ".join([_step(row), *(word for word, differs in zip(engine, told, strict=True) if differs)])
        for row, engine in zip(traces, engines, strict=True)
    ]
    seen = Counter(titles)
    pairs = zip(traces, titles, strict=True)
    return [f"{title}, commit {_commit(row)}" if seen[title] > 1 else title for row, title in pairs]


def _step(row: Row) -> str:
    return f"one decode step, {row['requests']} requests at {row['context']:,} tokens"


def _engine(row: Row) -> tuple[Any, ...]:
    forward = f"{row.get('forward', 'stock')} forward"
    return MODELS[row["model"]], PRECISIONS[row["precision"]], forward, f"decoded by {DECODERS[row['decode_kernel']]}"


def _trace_table(row: Row, title: str) -> str:
    parts = [*sorted(row["parts_ms"].items(), key=lambda item: -item[1]), ("nothing runs", row["idle_ms"])]
    lines = [[part, f"{ms:.2f}", f"{ms / row['step_ms']:.1%}"] for part, ms in [*parts, ("all", row["step_ms"])]]
    return table([title, "ms", "share"], lines)


# Syncs and exactness of the engine


def sync_table(rows: Sequence[Row]) -> str:
    """An update of Qwen3-8B's parameters from another process's GPU memory."""
    lines = []
    for one_buffer, words in ((False, "651 tensors, each lent by itself"), (True, "all in one buffer")):
        found = [row for row in _of(rows, "sync") if row["one_buffer"] is one_buffer][1:]  # The first compiles.
        cells = (_middle(found, key) for key in ("quantise_seconds", "seconds", "readback_seconds"))
        lines.append([words, *(f"{1000 * cell:.0f}" for cell in cells)])
    return table(["sync of 9.4 GB", "quantise, ms", "update, read-back included, ms", "read-back, ms"], lines)


def expert_sync_table(rows: Sequence[Row]) -> str:
    """Updates of Qwen3-30B-A3B's parameters, the middle one of a process; its first is left out."""
    same = [row for row in _of(rows, "sync") if row["model"] == "qwen3-30b-a3b"]
    lines = []
    for _, group in itertools.groupby(same, lambda row: (row["shared_layers"], row["commit"], row["command"])):
        first, *later = group
        cells = [f"{1000 * _middle(later or [first], key):,.0f}" for key in ("seconds", "readback_seconds")]
        words = f"{first['tensors']:,} tensors, " + ("one layer's for all" if first["shared_layers"] else "all layers'")
        words += (", in one buffer" if "one_buffer" in first else "") + (
            "" if later else ", the first update of a process"
        )
        lines.append([words, f"{first['bytes'] / 1e9:.1f}", *cells])
    return table(["sync of Qwen3-30B-A3B", "GB", "update, read-back included, ms", "read-back, ms"], lines)


def exactness_table(modes: dict[str, Sequence[Row]]) -> str:
    """Number of a probe's 64 tokens and log-probs that equal those of the probe alone, in the modes measured."""
    found = [_of(rows, "exactness") for rows in modes.values()]
    return table(
        ["the probe", *(f"{mode}: tokens, log-probs" for mode in modes)],
        [
            [rows[-1]["surroundings"], *(f"{row['equal_tokens']}, {row['equal_logprobs']}" for row in rows)]
            for rows in zip(*found, strict=True)
        ],
    )


def logprob_table(rows: Sequence[Row]) -> str:
    """vLLM against the exact reference, on random weights."""
    return table(
        ["nats", "vLLM to reference, mean", "largest", "reference to its BF16, mean"],
        [
            [
                PRECISIONS[row["precision"]],
                f"{row['mean']:.3f}",
                f"{row['max']:.2f}",
                f"{row['reference_to_bf16_mean']:.3f}",
            ]
            for row in _of(rows, "logprob_error")
        ],
    )


def rounding_table(rows: Sequence[Row]) -> str:
    """Compiled vLLM against the reference with each of its rounding points."""
    means = {
        (row["spread"], row["sides"][1], row["precision"]): row["mean"]
        for row in rows
        if row["part"] == "logprobs" and row["mode"] == "compiled"
    }
    lines = []
    for spread, points in itertools.product((1.0, 2.0), ("stepwise", "native", "kernels", "fused")):
        weights = "ordinary weights" if spread == 1.0 else "twice the spread"
        found = [means[spread, f"reference {points}", precision] for precision in ("bf16", "fp8_linear")]
        lines.append([f"{points}, {weights}", *(f"{mean:.4f}" for mean in found)])
    return table(["compiled vLLM to the reference, nats", "BF16", "FP8 linears"], lines)


def _middle(rows: Sequence[Row], key: str) -> float:
    return statistics.median(row[key] for row in rows)


def calibration_table(rows: Sequence[Row]) -> str:
    """The rows of kind `calibration` as Markdown."""
    columns = ("forward", "collect", "scales")
    lines = []
    for row in rows:
        if row["kind"] == "calibration":
            read = f", {row['sequences']} rollouts" if "sequences" in row else ""
            parts = [f"{row[f'{name}_seconds'] * 1000:,.0f}" for name in columns]
            source = [f"{row['source']}, {row['statistic']}{read}", f"{row['tokens']:,}"]
            lines.append([*source, *parts, f"{row['share_of_step']:.2%}"])
    header = ["source, statistic", "tokens read", "forward, ms", "collect, ms", "scales, ms", "share of the rollout"]
    return table(header, lines)


# Training


def speed_table(rows: Sequence[Row]) -> str:
    """Tokens per second of full steps, beside the BF16 of the same model and layers that was measured before it."""
    base, lines = dict[tuple[str, int, bool], float](), []
    for row in _of(rows, "training"):
        if row["precision"] == "bf16":
            base[_same(row)] = row["tokens_per_s"]
        words = _TRAINING[row["precision"]] + (", deterministic" if row["deterministic"] else "")
        words += f", {row['tokens_per_pass']:,} a pass, all kept" if row["tokens_per_pass"] < 16_384 else ""
        ratio = f"{row['tokens_per_s'] / base[_same(row)]:.2f}x" if _same(row) in base else "not measured"
        cells = [row["commit"][:7], f"{row['tokens_per_s']:,.0f}", ratio, f"{row['mfu']:.1%}", f"{row['peak_gb']:.0f}"]
        lines.append([_TRAINED.get(row["model"], row["model"]), words, *cells])
    header = ["a step of 65,536 tokens", "precision", "commit", "tokens/s", "to BF16", "MFU", "peak, GB"]
    return table(header, lines)


def _same(row: Row) -> tuple[str, int, bool]:
    return row["model"], row["layers"], row["checkpointing"]


def parts_table(rows: Sequence[Row]) -> str:
    """Milliseconds of GPU time of a step of Qwen3-8B by part, one column a precision."""
    of_model = (row for row in _of(rows, "training_trace") if row["model"] == "qwen3-8b" and row["checkpointing"])
    # The last of each.
    traces = {row["precision"]: row for row in of_model if not row["deterministic"]}
    parts = dict.fromkeys(part for row in traces.values() for part in row["parts_ms"])
    ordered = sorted(parts, key=lambda part: -max(row["parts_ms"].get(part, 0.0) for row in traces.values()))
    lines = [[part, *(f"{row['parts_ms'].get(part, 0.0):,.0f}" for row in traces.values())] for part in ordered]
    lines.append(["whole step", *(f"{1000 * row['traced_seconds']:,.0f}" for row in traces.values())])
    return table([f"{_TRAINED['qwen3-8b']}, ms of a step", *(_TRAINING[name] for name in traces)], lines)


def width_table(rows: Sequence[Row]) -> str:
    """Whole steps by the width of the model, and what the GPU computes of them: from where FP8 pays."""
    whole, computed = dict[str, dict[str, float]](), dict[str, dict[str, float]]()
    for row in rows:
        if row["kind"] == "training":
            whole.setdefault(row["model"], {})[row["precision"]] = 1000 * row["seconds"]
        elif row["kind"] == "training_trace":
            computed.setdefault(row["model"], {})[row["precision"]] = sum(row["parts_ms"].values())
    header = ["a step of 65,536 tokens", "BF16, ms", "FP8 linears, ms", "BF16 to FP8"]
    header += ["of it the GPU computes: BF16, ms", "GPU: FP8 linears, ms", "GPU: BF16 to FP8"]
    lines = []
    for model, of in whole.items():
        words = _TRAINED.get(model) or f"8 layers of width {model.removeprefix('width-')}"
        cells = [
            cell
            for ms in (of, computed[model])
            for cell in (f"{ms['bf16']:,.0f}", f"{ms['fp8_block']:,.0f}", f"{ms['bf16'] / ms['fp8_block']:.2f}x")
        ]
        lines.append([words, *cells])
    return table(header, lines)


# Megatron


def megatron_speed_table(rows: Sequence[Row]) -> str:
    """Tokens per second of whole steps and of scoring, beside BF16 of the same layers."""
    timed = _of(rows, "training")
    base = {row["model"]: row["step_tokens_per_second"] for row in timed if row["precision"] == "bf16"}
    lines = []
    for row in timed:
        speed, scored = row["step_tokens_per_second"], row["logprob_tokens_per_second"]
        ratio = f"{speed / base[row['model']]:.2f}x" if row["model"] in base else "not measured"
        model = [MODELS.get(row["model"], row["model"]), str(row["layers"]), _MEGATRON[row["precision"]]]
        lines.append([*model, f"{speed:,.0f}", ratio, f"{scored:,.0f}", f"{row['peak_gib']:.0f}"])
    header = ["model", "layers", "precision", "a step, tokens/s", "to BF16", "scoring, tokens/s", "peak, GiB"]
    return table(header, lines)


def megatron_parity_table(rows: Sequence[Row]) -> str:
    """Differences in log-probs, loss and gradients on equal weights and tokens."""
    lines = []
    for row in _of(rows, "trainer_parity"):
        gradients = f"{row['gradient_relative']:.4f}" if row["gradients_compared"] else "not told"
        numbers = [f"{row['logprob_mean']:.4f}", f"{row['logprob_max']:.4f}", f"{row['loss_difference']:.5f}"]
        lines.append([row["model"], _MEGATRON[row["precision"]], row["against"], *numbers, gradients])
    header = ["model", "precision", "against", "log-probs, mean, nats", "largest", "loss", "gradients, relative"]
    return table(header, lines)


# The loop


def loop_tables(rows: Sequence[Row]) -> Iterator[str]:
    """Alignment and learning, seconds of runs, of a step, and of its artifacts; of what there are rows."""
    if found := _of(rows, "alignment"):
        forms = _ALIGNMENT.values()
        lines = [[_named(row), *(f"{row[key]:{form}}" for key, form in forms)] for row in found]
        yield table(["variant", *_ALIGNMENT], lines)
        yield _by_name("seconds of a run", found, "seconds", lambda seconds: f"{seconds:.1f}")
    if found := _of(rows, "step_ledger"):
        yield ledger_table(found)
        # Rows of earlier runs have none.
        if found := [row for row in found if "artifacts" in row]:
            yield _by_name("ms of a step's artifacts", found, "artifacts", lambda seconds: f"{1000 * seconds:.0f}")


def ledger_table(rows: Sequence[Row]) -> str:
    """Mean milliseconds of a step by part, each with its percentage of the step; `rest` is all that is not _WORK.

    Parts that run side by side count in full, so that those outside _WORK may add up to more than the rest.
    """
    names = list(dict.fromkeys(name for row in rows for name in row["seconds"] if name != WALL))
    lines = []
    for row in rows:
        seconds, whole = row["seconds"], row["seconds"][WALL]
        parts = [*(seconds.get(name, 0.0) for name in names), whole - sum(seconds.get(name, 0.0) for name in _WORK)]
        *cells, rest = (f"{1000 * part:.0f} ({100 * part / whole:.1f} %)" for part in parts)
        lines.append([_named(row), *cells, f"{1000 * whole:.0f}", rest, str(row["steps"])])
    return table(["ms of a step", *names, "whole", "rest", "steps"], lines)


def _by_name(title: str, rows: Sequence[Row], key: str, form: Callable[[float], str]) -> str:
    # A sum comes after its parts, whichever row has a part first.
    names = sorted(dict.fromkeys(name for row in rows for name in row[key]), key=lambda name: name == "total")
    return table([title, *names], [[_named(row), *(form(row[key].get(name, 0.0)) for name in names)] for row in rows])


def _named(row: Row) -> str:
    """The variant, its seed where there are several, and engine and source of old log-probs where they are unusual."""
    seed = f", seed {row['seed']}" if "seed" in row else ""
    engine = ", SGLang" if row.get("engine") == "sglang" else ""
    source = row.get("logprobs", "pass")
    return f"{row['variant']}{seed}{engine}" + ("" if source == "pass" else f", log-probs of {source}")


# A parity run

_KEPT = ("config", "ended", "outcome", "seeds", "variants", "checks", "versions", "hardware")


def parity_row(verdict: Row) -> Row:
    """A verdict as a row, without its settings, which name folders."""
    return {"kind": "parity", **{key: verdict[key] for key in _KEPT}, "commit": None, **verdict["git"], "command": None}


def parity_table(parity: Row) -> str:
    """A row for each check and a column for each variant; what did not pass is marked."""
    found: dict[str, dict[str, str]] = {}
    for check in parity["checks"]:
        if check["variant"] in parity["variants"]:  # The preflight is of no variant.
            words = check["found"] if check["outcome"] == "PASS" else f"{check['found']} ({check['outcome']})"
            found.setdefault(check["name"], {"bound": check["bound"]})[check["variant"]] = words
    columns = [*parity["variants"], "bound"]
    return table(["", *columns], [[name, *(cells.get(c, "") for c in columns)] for name, cells in found.items()])


# What is stored


def _engine_tables() -> list[str]:
    kernels, rollouts, attention = stored("kernels_hopper"), stored("rollout_hopper"), stored("attention_hopper")
    return [
        quantiser_table(kernels),
        fingerprint_table(kernels),
        rollout_table(rollouts),
        run_table(rollouts),
        prompt_table(_of(rollouts, "prompts")),
        *trace_tables([*stored("decode_trace_hopper"), *rollouts]),
        attention_table(attention),
        decode_table(attention),
        sync_table(stored("step_costs_hopper")),
        expert_sync_table(stored("sync_hopper")),
        exactness_table({mode: stored(f"vllm_hopper/{name}") for name, mode in _EXACTNESS.items()}),
        logprob_table(stored("vllm_hopper/logprobs")),
        rounding_table(stored("vllm_bisect_hopper")),
    ]


def _sglang_tables() -> list[str]:
    found = stored("sglang_exactness")
    cases = {
        "default": ("fp8_linear_kv", False),
        "batch-invariant": ("fp8_linear_kv", True),
        "aligned": ("aligned", False),
    }
    modes = {
        mode: [row for row in found if (row["case"], row["batch_invariant"]) == case] for mode, case in cases.items()
    }
    return [sglang_table(stored("sglang_hopper")), exactness_table(modes)]


def _training_tables() -> list[str]:
    training, widths, fused = (stored(f"{name}_hopper") for name in ("training", "training_widths", "fused"))
    return [speed_table(training), parts_table(training), width_table(widths), fused_table(fused)]


def _megatron_tables() -> list[str]:
    rows = stored("megatron_hopper")
    of_deployments = _table_of("deployment_hopper", "deployment_table")
    return [megatron_speed_table(rows), megatron_parity_table(rows), *of_deployments]


def recovery_table(rows: Sequence[Row]) -> str:
    """One line for each kind of loss."""
    return table(
        ["lost", "on", "times", "noticed, s", "next token, s", "largest, s", "finished", "of these lost", "made again"],
        [
            [
                row["what"],
                f"{row['gpus']} GPUs" if row["gpus"] else "CPU",
                str(row["times"]),
                f"{row['noticed']['median']:.1f}",
                f"{row['seconds']['median']:.1f}",
                f"{row['seconds']['largest']:.1f}",
                *(f"{row[key]:,}" for key in ("finished", "lost", "again")),
            ]
            for row in rows
        ],
    )


def _table_of(script: str, printer: str) -> list[str]:
    """The table that a function of a script prints; that script reads tables of this module."""
    found: str = getattr(import_module(f"benchmarks.{script}"), printer)(stored(script))
    return [found]


TABLES: dict[str, Callable[[], list[str]]] = {
    "engine": _engine_tables,
    "calibration": lambda: [calibration_table(stored("step_costs_hopper"))],
    "training": _training_tables,
    "megatron": _megatron_tables,
    "real": lambda: [*loop_tables(stored("real_parity")), parity_table(stored("parity_real")[0])],
    "real-steps": lambda: _table_of("real_steps", "step_table"),
    "loop": lambda: [*loop_tables(stored("small_hopper")), *loop_tables(stored("large_ledger"))],
    "parity": lambda: [parity_table(stored("parity_tiny")[0])],
    "recovery": lambda: [recovery_table(stored("recovery"))],
    "cluster": lambda: [step_table(stored("cluster_hopper"))],
    "load": lambda: _table_of("grpo_8gpu", "step_table"),
    "asynchronous": lambda: _table_of("asynchronous_hopper", "mode_table"),
    "episodes": lambda: episode_tables(stored("episodes_hopper")),
    "sglang": _sglang_tables,
    "attention": lambda: [whole_attention_table(stored("attention_forward"))],
    "verifiers": lambda: speed_tables(stored("verifier_speed")),
}

if __name__ == "__main__":
    main()
