"""Whole GRPO steps of an 8B model on N GPUs at the load of NeMo RL's published figures, through `fp8-grpo run`.

    python -m benchmarks.grpo_8gpu --out FOLDER --gpus 8 --models llama-3.1-8b --precisions fp8
    python -m benchmarks.grpo_8gpu --out FOLDER --gpus 1 --models qwen3-8b --precisions fp8 bf16
    python -m benchmarks.grpo_8gpu --out FOLDER --gpus 4 --mode one_step_off --models qwen3-8b --precisions fp8
    python -m benchmarks.grpo_8gpu --out FOLDER --gpus 4 --logprobs rollout --models qwen3-8b --precisions fp8
    python -m benchmarks.grpo_8gpu --out FOLDER --gpus 2 --tiny                          a rehearsal on a CPU

A step has 256 completions a GPU, 32 of a prompt, as the 64 prompts of NeMo RL give on 8 GPUs; it makes four updates. A
completion has at most 4,096 tokens, 1,060 on average. Weights are random, so the next token is one of K ends with a
probability of K in the size of the vocabulary, and lengths are geometric; K is chosen for the mean. `tokens` are those
that train, prompts and completions, as NeMo RL counts them in its performance summary.

All GPUs generate and train in turn; with --engines N, N of them generate and the others train. Ahead of the update and
without --engines, both compute on each GPU at the same time: start `nvidia-cuda-mps-control -d` before. With --mode
in_turn nothing is generated beside the update: a rollout generates for all steps that --staleness allows.

Each model in a precision is a run of its own, killed after its last step (`large_ledger`), and a row of kind
`grpo_step` in --rows. Other rows of that file stay, so one call may measure one of them. The prediction that a row
holds was written before.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.harness import MODELS, Row, gpu_here, table, write_rows
from benchmarks.large_ledger import QWEN3_8B, committed, make_model, train
from benchmarks.small_hopper import Training, plan, step_ledger_row, timed_steps
from fp8core.models.architecture import Architecture
from fp8core.models.hub import HUB_ARCHITECTURES
from fp8core.report.run_data import RunData, read_run
from fp8core.rl.alignment_metrics import COMPARED_TOKENS, TMPE, TOKENS_DIFFERING
from fp8core.store.artifacts import ArtifactStore
from fp8core.store.metrics import series

RESULT = "grpo_8gpu"
PREDICTION = Path(__file__).with_name(f"{RESULT}_prediction.json")
VARIANTS = {"fp8": "fp8_end_to_end_kv", "bf16": "bf16"}
"""By precision: FP8 is aligned, the same bits on both sides; BF16 runs vLLM's own model."""
SHAPES = {
    "llama-3.1-8b": ("llama-aligned", HUB_ARCHITECTURES["meta-llama/Llama-3.1-8B-Instruct"]),
    "qwen3-8b": ("qwen3-aligned", QWEN3_8B),
}
"""Configuration and shape of each model."""
SOURCES = ("pass", "rollout")
MODES = ("synchronous", "one_step_off", "asynchronous")
IN_TURN = "in_turn"
PARTS = ("rollout", "logprobs", "train", "wall")
_TINY = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_heads": 2, "num_kv_heads": 1}
_CASE = ("model", "precision", "layers", "gpus", "engines", "mode", "staleness", "logprobs")
# The first step compiles.
_WARM_UP = 1


@dataclass(frozen=True)
class Load:
    """The completions of a step: prompts a GPU, completions of each, and the longest and mean number of their tokens.

    `settings` are further ones of the configuration.
    """

    prompts: int
    group: int
    longest: int
    mean: float
    settings: dict[str, Any]


NEMO = Load(
    prompts=8,
    group=32,
    longest=4096,
    mean=1060.0,
    # Prompts have at most 512 tokens.
    settings={"rollout.vllm.max_model_len": 4608, "training.reduce_gradients": "per_pass"},
)
REHEARSAL = Load(
    prompts=4,
    group=4,
    longest=32,
    mean=8.0,
    settings={
        **{"rollout.engine": "embedded", "rollout.vllm.sleep": False, "precision.rounding_points": "stepwise"},
        **{"training.device": "cpu", "training.packed": False, "threads": 1},
    },
)
_COMMON = {
    "data.source": "chain",
    "reward.verifier": "benchmarks.random_reward:score",
    "training.minibatches": 4,
    "evaluation": {"every": 1_000_000, "prompts": 1},
    "checkpoint.every": 1_000_000,
}
# GiB for 256 completions: no more than 110,000 of their tokens are there at a time.
_CACHE = {"bf16": 18.0, "fp8": 14.5}
# An engine with a GPU of its own has several times as many of them.
_APART = {"rollout.max_batch": 512, "rollout.vllm.gpu_memory_utilization": 0.88, "rollout.vllm.sleep": False}
# An engine that generates beside the update keeps its memory: on 80 GB there is room for this in FP8.
_BESIDE = {"rollout.vllm.sleep": False, "rollout.vllm.kv_cache_gib": 9.0, "training.tokens_per_pass": 8192}
# Each chunk sends every request anew. In turn, what others write beyond the last token of a step is lost; the longest
# completion of a step nearly always has the most tokens, which are four chunks.
_CHUNK = {"asynchronous": 128, IN_TURN: 1024}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is asked for, row after row; returns 0 when all have their steps, else 1."""
    options = options_of(arguments)
    end, out = time.monotonic() + options.seconds, options.out.absolute()
    (out / "logs").mkdir(parents=True, exist_ok=True)
    rows = json.loads(options.rows.read_text()) if options.rows.exists() else []
    predictions = json.loads(options.predict.read_text()) if options.predict.exists() else []
    missing = list[str]()
    for model in options.models:
        for precision in options.precisions:
            chosen, arch = prepared(model, precision, options)
            if not committed(chosen, _WARM_UP + options.steps):
                train(chosen, _WARM_UP + options.steps, out / "logs" / f"{chosen.folder.name}.log", end)
            if not committed(chosen, _WARM_UP + options.steps):
                missing.append(f"{model} in {precision}")
                continue
            row = step_row(chosen, arch, (model, precision), options)
            row["predicted"] = next((each["predicted"] for each in predictions if _same(each, row)), None)
            rows = [*(each for each in rows if not _same(each, row)), row]
            write_rows(options.rows, rows)
    print(step_table(rows), *(f"not measured: {each}" for each in missing), sep="\n", flush=True)
    return int(bool(missing))


def shape(model: str, options: argparse.Namespace) -> tuple[Architecture, Path]:
    """The shape of a model, and its folder."""
    arch = SHAPES[model][1]
    if options.tiny:
        arch = replace(arch, **_TINY, num_layers=2, max_positions=1024)
    arch = replace(arch, num_layers=options.layers or arch.num_layers)
    tiny = "-tiny" if options.tiny else ""
    return arch, options.out.absolute() / f"model-{model}-{arch.num_layers}{tiny}"


def planned(model: str, precision: str, options: argparse.Namespace) -> Training:
    """The training of a model in a precision. Raises UserError: the configuration is refused."""
    load, folder = _load(options), shape(model, options)[1]
    settings = {
        **_COMMON,
        **load.settings,
        "rollout.prompts_per_step": load.prompts * options.gpus,
        "rollout.group_size": load.group,
        "rollout.max_new_tokens": load.longest,
        "pipeline.mode": "asynchronous" if options.mode == IN_TURN else options.mode,
        "logprobs.source": options.logprobs,
        "cluster.engines": options.engines or options.gpus,
        "cluster.ranks": options.gpus - options.engines,
        "steps": _WARM_UP + options.steps + 1,
    }
    if options.engines:
        settings |= {"cluster.placement": "separate", **({} if options.tiny else _APART)}
    elif not options.tiny:
        together = 1 + options.staleness if options.mode == IN_TURN else 1
        settings |= {"rollout.max_batch": 256 * together, "rollout.vllm.kv_cache_gib": _CACHE[precision] * together}
        settings |= {} if options.mode in ("synchronous", IN_TURN) else _BESIDE
    if options.mode in _CHUNK:
        settings |= {"pipeline.max_staleness": options.staleness}
        settings |= {"pipeline.ahead_tokens": 0} if options.mode == IN_TURN else {}
        settings |= {} if options.tiny else {"pipeline.chunk_tokens": _CHUNK[options.mode]}
    if options.logprobs == "rollout" and options.mode != "synchronous":
        settings |= {"correction.method": "preset", "correction.preset": "verl/bypass_ppo_clip"}
    overrides = [f"model={folder}", *(f"{key}={json.dumps(value)}" for key, value in settings.items())]
    runs = folder.parent / "runs"
    (made,) = plan(SHAPES[model][0], [*overrides, *options.overrides], [VARIANTS[precision]], runs)
    case = f"{precision}-{options.gpus}-{options.engines}-{options.mode}-{_staleness(options)}-{options.logprobs}"
    return replace(made, folder=runs / f"{folder.name.removeprefix('model-')}-{case}")


def prepared(model: str, precision: str, options: argparse.Namespace) -> tuple[Training, Architecture]:
    """The training as `planned`, whose model is written, and the shape of that."""
    (arch, folder), load = shape(model, options), _load(options)
    make_model(folder, arch, "cpu" if options.tiny else "cuda", ends_for(arch.vocab_size, load.longest, load.mean))
    return planned(model, precision, options), arch


def ends_for(vocab_size: int, longest: int, mean: float) -> int:
    """The number of tokens that end a completion, for lengths that are geometric up to `longest`, with this mean."""
    low, high = 0.0, 1.0
    for _ in range(60):
        share = (low + high) / 2
        low, high = (share, high) if (1 - (1 - share) ** longest) / share > mean else (low, share)
    return max(1, round(low * vocab_size))


def step_row(training: Training, arch: Architecture, case: tuple[str, str], options: argparse.Namespace) -> Row:
    """Means over the steps after the first; errors are the largest of all steps.

    `written` is the share of the tokens trained on that was written in the same steps. Where it is not near 1, the
    steps use completions of earlier ones, or write those of later ones, and their speed is not that of a long run.
    """
    run = read_run(training.folder, training.variant)
    measured = step_ledger_row(run, training.variant, training.label)
    assert measured is not None, f"{training.folder}: no step between two commits"
    steps = [step.commit.step for step in timed_steps(run.view)]
    sizes = [_sizes(run, step) for step in steps]
    trained = sum(size["generated_tokens"] for size in sizes)
    tokens = sum(size["prompt_tokens"] + size["generated_tokens"] for size in sizes) / len(sizes)
    seconds, per_gpu = measured["seconds"], tokens / options.gpus
    settings = dict(setting.split("=", 1) for setting in training.settings[1:])
    return {
        "kind": "grpo_step",
        "model": f"rehearsal of {case[0]}" if options.tiny else case[0],
        "precision": case[1],
        "layers": arch.num_layers,
        "gpus": options.gpus,
        "engines": options.engines or options.gpus,
        "mode": options.mode,
        "staleness": _staleness(options),
        "logprobs": options.logprobs,
        "completions": sizes[-1]["completions"],
        "steps": len(steps),
        "tokens": round(tokens),
        "written": 1 + (sizes[-1]["ahead"] - _ahead(run, steps[0] - 1)) / trained,
        "length_mean": trained / sum(size["completions"] for size in sizes),
        "length_longest": max(size["longest"] for size in sizes),
        "tokens_per_s_per_gpu": per_gpu / seconds["wall"],
        "seconds": seconds,
        "sizes": sizes,
        "error_max": max(series(run.history, TMPE.name)[1]),
        "tokens_verified": int(sum(series(run.history, COMPARED_TOKENS.name)[1])),
        "tokens_differing": int(sum(series(run.history, TOKENS_DIFFERING.name)[1])),
        "settings": settings,
        **{key: measured[key] for key in ("commit", "dirty", "versions") if key in measured},
        "hardware": measured["hardware"] | gpu_here(),
        # Another place has the model elsewhere.
        "command": measured["command"].replace(training.settings[0], "model=FOLDER/model"),
        "driver": " ".join(["python -m benchmarks.grpo_8gpu", *_driver(options)]),
    }


def _sizes(run: RunData, step: int) -> Row:
    rollouts = ArtifactStore(run.view.folder).get_table(run.view.steps[step].artifacts["rollouts"])
    prompts, completions = (
        [len(tokens) for tokens in rollouts[name].to_pylist()] for name in ("prompt_tokens", "tokens")
    )
    return {
        "completions": len(completions),
        "prompt_tokens": sum(prompts),
        "generated_tokens": sum(completions),
        "longest": max(completions),
        "ahead": _ahead(run, step),
    }


def _ahead(run: RunData, step: int) -> int:
    """Tokens that are written after a step and have not been trained on."""
    stream = run.view.steps[step].artifacts.get("next_stream")
    if stream is None:
        return 0
    return sum(map(len, ArtifactStore(run.view.folder).get_table(stream)["tokens"].to_pylist()))


def step_table(rows: Sequence[Row]) -> str:
    """One line a row: tokens a second and GPU, seconds by part, and the largest error."""
    parts = [f"{part}, s" for part in PARTS]
    return table(
        ("model", "precision", "GPUs", "mode", "old log-probs", "tokens/s/GPU", *parts, "error"),
        (
            (
                MODELS.get(row["model"], row["model"]),
                row["precision"],
                f"{row['gpus']} {row['hardware'].get('gpu', 'CPU').removeprefix('NVIDIA ').split()[0]}",
                row["mode"] + (f", {row['staleness']}" if row["staleness"] else ""),
                row["logprobs"],
                f"{row['tokens_per_s_per_gpu']:,.0f}",
                *(f"{row['seconds'].get(part, 0.0):.1f}" for part in PARTS),
                f"{row['error_max']:.6g}",
            )
            for row in rows
        ),
    )


def _same(one: Row, other: Row) -> bool:
    return all(one[key] == other[key] for key in _CASE)


def _staleness(options: argparse.Namespace) -> int:
    """Versions that a token is older by at most."""
    fixed = {"synchronous": 0, "one_step_off": 1}
    return fixed.get(options.mode, options.staleness)


def _load(options: argparse.Namespace) -> Load:
    return REHEARSAL if options.tiny else NEMO


def _driver(options: argparse.Namespace) -> list[str]:
    sizes = [f"--gpus {options.gpus}", f"--engines {options.engines}", f"--mode {options.mode}"]
    sizes += [f"--staleness {options.staleness}"] if options.mode in _CHUNK else []
    sizes += [f"--logprobs {options.logprobs}", f"--steps {options.steps}", *(["--tiny"] if options.tiny else [])]
    return ["--out FOLDER", *sizes, *(f"--set {override}" for override in options.overrides)]


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of models, runs and logs")
    parser.add_argument("--rows", type=Path, help="file that the rows are added to (default FOLDER/grpo_8gpu.json)")
    parser.add_argument("--predict", type=Path, default=PREDICTION, help="file of predictions written before")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--engines", type=int, default=0, help="GPUs that only generate (default 0: all do both)")
    parser.add_argument("--mode", choices=(*MODES, IN_TURN), default=MODES[0])
    parser.add_argument("--staleness", type=int, default=1, help="of asynchronous tokens, in versions (default 1)")
    parser.add_argument("--logprobs", choices=SOURCES, default="pass", help="of the old policy (default: a pass)")
    parser.add_argument("--models", nargs="+", choices=tuple(SHAPES), default=list(SHAPES))
    parser.add_argument("--precisions", nargs="+", choices=tuple(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--steps", type=int, default=2, help="that are measured, after a first one (default 2)")
    parser.add_argument("--layers", type=int, help="of the model (default: all)")
    parser.add_argument("--seconds", type=float, default=560.0, help="of this call (default 560)")
    parser.add_argument("--tiny", action="store_true", help="a tiny model with the embedded engine, on a CPU")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    options = parser.parse_args(arguments)
    if not 0 <= options.engines < options.gpus:
        parser.error(f"--engines {options.engines}: of {options.gpus} GPUs at least one trains")
    if options.engines and options.mode == IN_TURN:
        parser.error(f"--engines {options.engines}: in turn, all GPUs generate and all train")
    if options.mode == IN_TURN and options.steps % (1 + options.staleness):
        parser.error(f"--steps {options.steps}: one rollout generates for {1 + options.staleness} steps, measure all")
    options.rows = options.rows or options.out / f"{RESULT}.json"
    return options


if __name__ == "__main__":
    sys.exit(main())
