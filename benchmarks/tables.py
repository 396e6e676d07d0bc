"""Print the tables of docs/results from stored rows; none measures what another prints.

python -m benchmarks.tables [NAME ...]                                     all when none is named
python -m benchmarks.tables --rows FILE.json loop                          from rows that are not stored yet
python -m benchmarks.tables --rows runs/parity/NAME/verdict.json parity    of a run; --keep FILE stores its row
"""

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from statistics import fmean

from benchmarks.harness import MODELS, PRECISIONS, Row, stored, table, write_rows
from benchmarks.real_accuracy import accuracy_tables

SHAPE = [16384, 4096]
WALL = "wall"
# The variant of `fused_hopper.VARIANTS` that the engine runs: keys of a partition, blocks a multiprocessor, stages.
_OURS = "ours 4096 3 2"
_TRAINED = MODELS | {"small": "110M, 12 layers of width 768", "qwen3-30b-a3b": "Qwen3-30B-A3B, 12 layers"}
_TRAINING = {
    "bf16": PRECISIONS["bf16"],
    "fp8_block": PRECISIONS["fp8_linear"],
    "fp8_block_kv": PRECISIONS["fp8_linear_kv"],
}
_PARTS_OF_EXPERTS = (
    *("router", "choose_experts", "expert_rows", "row_codes", "gathered_codes", "gate_up", "swiglu_row_codes"),
    *("down", "mixed", "all"),
)
# Parts of a step that are tables of their own, in seconds; `artifacts` are its files.
_STEP = ("rollout", "ahead", "logprobs", "train", "sync", "evaluate", "artifacts", "orchestration", WALL)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(TABLES))
    parser.add_argument("--rows", type=Path, help="for `loop` or `parity`, instead of what is stored")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="write the row of a parity run")
    options = parser.parse_args(arguments)
    if unknown := {*options.names} - {*TABLES}:
        parser.error(f"{', '.join(sorted(unknown))}: none of {', '.join(TABLES)}")
    if options.rows is None:
        print(*(text for name in options.names or TABLES for text in TABLES[name]()), sep="\n\n")
        return
    content = json.loads(options.rows.read_text())
    if options.names == ["parity"]:
        parity = content[0] if isinstance(content, list) else parity_row(content)
        print(parity_table(parity))
        if options.keep is not None:
            write_rows(options.keep, [parity])
    else:
        print(*loop_tables(content), sep="\n\n")


def _of(rows: Iterable[Row], *kinds: str) -> list[Row]:
    return [row for row in rows if row["kind"] in kinds]


# Rollouts


def rollout_table(rows: Sequence[Row]) -> str:
    """Tokens per second of each shape, and the ratio to BF16 with as many tokens a step; the newest row of each."""
    kinds = {
        "BF16": ("bf16", "stock"),
        "FP8 linears": ("fp8_linear", "stock"),
        "and cache, attention": ("fp8_linear_kv", "stock"),
        "the same, aligned": ("fp8_linear_kv", "aligned"),
    }
    newest = dict[str, dict[tuple[str, str], float]]()
    for row in _of(rows, "rollout"):
        if not row.get("routes"):
            newest.setdefault(_shape(row), {})[row["precision"], row.get("forward", "stock")] = row["tokens_per_s"]
    lines = []
    for shape, speeds in newest.items():
        base = speeds[kinds["BF16"]]
        cells = (
            f"{speeds[kind]:,.0f} ({speeds[kind] / base:.2f}x)" if kind in speeds else "" for kind in kinds.values()
        )
        lines.append([shape, *cells])
    return table(["tokens/s", *kinds], lines)


def _shape(row: Row) -> str:
    lengths = f"up to {row['generated']}" if row["long_tailed"] else row["generated"]
    return f"{MODELS[row['model']]}, {row['requests']} x ({row['prompt']} + {lengths})"


def _rollout_tables() -> list[str]:
    rollouts = stored("rollout_hopper")
    return [
        rollout_table(rollouts),
        _table_of("rollout_hopper", "prompt_table", _of(rollouts, "prompts")),
        _table_of("sglang_hopper", "sglang_table"),
    ]


# Training


def speed_table(rows: Sequence[Row]) -> str:
    """Tokens per second of full steps, beside the BF16 of the same model and layers that was measured before it."""
    base, lines = dict[tuple[str, int, int], float](), []
    for row in _of(rows, "training"):
        same = row["model"], row["layers"], row["tokens_per_pass"]
        if row["precision"] == "bf16":
            base[same] = row["tokens_per_s"]
        words = _TRAINING[row["precision"]] + (", deterministic" if row["deterministic"] else "")
        words += f", {row['tokens_per_pass']:,} a pass" if row["tokens_per_pass"] != 16_384 else ""
        words += "" if row["checkpointing"] else ", all kept"
        ratio = f"{row['tokens_per_s'] / base[same]:.2f}x" if same in base else "not measured"
        cells = [f"{row['tokens_per_s']:,.0f}", ratio, f"{row['mfu']:.1%}", f"{row['peak_gb']:.0f}"]
        lines.append([_TRAINED.get(row["model"], row["model"]), words, *cells])
    header = ["a step of 65,536 tokens", "precision", "tokens/s", "to BF16", "MFU", "peak, GB"]
    return table(header, lines)


def width_table(rows: Sequence[Row]) -> str:
    """Whole steps by the width of the model: from where FP8 pays."""
    steps = dict[str, dict[str, float]]()
    for row in _of(rows, "training"):
        steps.setdefault(row["model"], {})[row["precision"]] = 1000 * row["seconds"]
    lines = []
    for model, ms in steps.items():
        words = _TRAINED.get(model) or f"8 layers of width {model.removeprefix('width-')}"
        ratio = f"{ms['bf16'] / ms['fp8_block']:.2f}x"
        lines.append([words, f"{ms['bf16']:,.0f}", f"{ms['fp8_block']:,.0f}", ratio])
    return table(["a step of 65,536 tokens", "BF16, ms", "FP8 linears, ms", "ratio"], lines)


def expert_table(rows: Sequence[Row]) -> str:
    """Microseconds of the parts of a sparse layer's second half, by tokens, and of reading its weights."""
    layers = {row["tokens"]: row for row in _of(rows, "experts_layer")}
    lines = [[part, *(f"{row['microseconds'][part]:.0f}" for row in layers.values())] for part in _PARTS_OF_EXPERTS]
    lines.append(["weights at 4.8 TB/s", *(f"{row['weight_microseconds']['all']:.0f}" for row in layers.values())])
    return table(["microseconds", *(f"{tokens:,} tokens" for tokens in layers)], lines)


# Kernels


def quantiser_table(kernels: Sequence[Row]) -> str:
    """Microseconds of the quantisers of a BF16 [16384, 4096] tensor: ours beside others."""
    forms = ("rows", "rows and columns", "tiles")
    found = dict[tuple[str, str], dict[str, str]]()
    for row in _of(kernels, "quantise", "peers"):
        left_out = row["kernel"] == "copy" or row["kernel"].startswith("torch reference")
        if row.get("shape") == SHAPE and row["dtype"] == "torch.bfloat16" and not left_out:
            library, _, form = row["kernel"].rpartition(", ")
            found.setdefault((library or "ours", row["rule"]), {})[form] = f"{row['microseconds']:.0f}"
    lines = [[*key, *(cells.get(form, "") for form in forms)] for key, cells in found.items()]
    return table(["BF16 16384 x 4096, microseconds", "rule", *forms], lines)


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
        numbers = [f"{found[key]['microseconds']:.0f}" for key in columns]
        _, theirs, ours = (found[key]["microseconds"] for key in columns)
        lines.append([f"{requests} x {context:,}", *numbers, f"{theirs / ours:.2f}x"])
    header = ["requests x context, us", "FlashAttention 3, BF16", "FP8", "ours, FP8", "ours to FP8"]
    return table(header, lines)


def support_table(rows: Sequence[Row]) -> str:
    """Milliseconds to find supports, of flat and of steep logits."""
    cells: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row.get("kernel") in ("truncation", "vLLM") and "logits" in row:
            cuts = [
                f"{name} {row[name]}" for name in ("top_k", "top_p", "min_p") if row.get(name) not in (None, 1.0, 0.0)
            ]
            name = ", ".join(cuts) or "vLLM's sort: top_k 20, top_p 0.95"
            cells.setdefault(name, {})[row["logits"]] = row
    lines = [
        [
            name,
            *(f"{found[logits]['microseconds'] / 1000:.2f}" for logits in ("flat", "steep")),
            str(found["flat"].get("predicted_microseconds", 0) / 1000 or ""),
        ]
        for name, found in cells.items()
    ]
    return table(["256 x 151,936 logits, ms", "flat", "steep", "predicted"], lines)


def _kernel_tables() -> list[str]:
    return [
        quantiser_table(stored("kernels_hopper")),
        decode_table(stored("attention_hopper")),
        support_table(stored("kernels_hopper")),
    ]


# The loop


def loop_tables(rows: Sequence[Row]) -> Iterator[str]:
    """Alignment and learning, and seconds of a step; of what there are rows."""
    if found := _of(rows, "alignment"):
        yield alignment_table(found)
    if found := _of(rows, "step_ledger"):
        yield ledger_table(found)


def alignment_table(rows: Sequence[Row]) -> str:
    """Error of each variant, and its first and last held-out accuracy: means over its seeds."""
    lines = []
    for name, same in _by_name(rows):
        learned = f"{_mean(same, 'heldout_first'):.3f} -> {_mean(same, 'heldout_last'):.3f}"
        error, k3 = f"{max(row['tmpe_max'] for row in same):.5f}", f"{_mean(same, 'k3_kl'):.1e}"
        lines.append([name, error, k3, learned])
    return table(["variant", "error, largest", "k3", "held-out"], lines)


def ledger_table(rows: Sequence[Row]) -> str:
    """Mean seconds of a step by part, over the seeds of a variant. Parts that run side by side count in full."""
    names = [name for name in _STEP if any(row["seconds"].get(name, 0.0) >= 0.005 for row in rows)]
    lines = []
    for name, same in _by_name(rows):
        means = (fmean(row["seconds"].get(part, 0.0) for row in same) for part in names)
        lines.append([name, *(f"{mean:.2f}" for mean in means)])
    return table(["seconds of a step", *names], lines)


def _by_name(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    for name in dict.fromkeys(map(_named, rows)):
        yield name, [row for row in rows if _named(row) == name]


def _mean(rows: Sequence[Row], key: str) -> float:
    return fmean(row[key] for row in rows)


def _named(row: Row) -> str:
    """The variant, and engine and source of old log-probs where they are unusual."""
    engine = ", SGLang" if row.get("engine") == "sglang" else ""
    source = row.get("logprobs", "pass")
    return f"{row['variant']}{engine}" + ("" if source == "pass" else f", log-probs of {source}")


# A parity run

_VERDICT = ("config", "ended", "outcome", "seeds", "variants", "checks", "versions", "hardware")


def parity_row(verdict: Row) -> Row:
    """A verdict as a row, without its settings, which name folders."""
    return {
        "kind": "parity",
        **{key: verdict[key] for key in _VERDICT},
        "commit": None,
        **verdict["git"],
        "command": None,
    }


def parity_table(parity: Row) -> str:
    """A row for each check and a column for each variant; what did not pass is marked."""
    found: dict[str, dict[str, str]] = {}
    for check in parity["checks"]:
        if check["variant"] in parity["variants"]:
            words = check["found"] if check["outcome"] == "PASS" else f"{check['found']} ({check['outcome']})"
            found.setdefault(check["name"], {"bound": check["bound"]})[check["variant"]] = words
    columns = [*parity["variants"], "bound"]
    return table(["", *columns], [[name, *(cells.get(c, "") for c in columns)] for name, cells in found.items()])


# Tables by name


def _table_of(script: str, printer: str, rows: Sequence[Row] | None = None) -> str:
    """The table that a function of a script prints from its rows; that script reads tables of this module."""
    found: str = getattr(import_module(f"benchmarks.{script}"), printer)(stored(script) if rows is None else rows)
    return found


TABLES: dict[str, Callable[[], Iterable[str]]] = {
    "rollout": _rollout_tables,
    "episodes": lambda: [_table_of("episodes_hopper", "episode_table")],
    "training": lambda: [speed_table(stored("training_hopper")), width_table(stored("training_widths_hopper"))],
    "experts": lambda: [expert_table(stored("experts_hopper"))],
    "kernels": _kernel_tables,
    "loop": lambda: [*loop_tables(stored("large_ledger")), alignment_table(_of(stored("small_hopper"), "alignment"))],
    "load": lambda: [_table_of("grpo_8gpu", "step_table")],
    "cluster": lambda: [_table_of("cluster_hopper", "step_table")],
    "accuracy": lambda: accuracy_tables(stored("real_accuracy")),
}

if __name__ == "__main__":
    main()
