"""The ledger of a whole GRPO step at a real model's shape on one H200, BF16 beside FP8, through `fp8-grpo run`.

    python -m benchmarks.large_ledger --out FOLDER --seconds 560                   both variants, one after the other
    python -m benchmarks.large_ledger --out FOLDER --seconds 560 bf16              one of them
    python -m benchmarks.large_ledger --out FOLDER --logprobs training             without a log-prob pass
    python -m benchmarks.large_ledger --out FOLDER --engine sglang fp8_end_to_end_kv
    python -m benchmarks.large_ledger --out FOLDER --model qwen3-30b-a3b           experts, 12 of 48 layers
    python -m benchmarks.large_ledger --out FOLDER --layers 2 --device cpu         a rehearsal, of a tiny model

The weights are random, because time does not depend on them; other benchmarks use `make_model` too. A run is started
for one step more than --steps and killed once these are committed. So it never reaches its last step, which alone would
be evaluated and leave a checkpoint of 80 GB. Two more things are unlike a training: the verifier
(`benchmarks.random_reward`), and an evaluation of one prompt. A second call reuses the model and the runs that are
complete, and begins the others anew. FOLDER/large_ledger.json has the rows, FOLDER/logs the output of each run.
"""

import argparse
import json
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.harness import Row, run_till, write_rows
from benchmarks.small_hopper import Training, plan, step_ledger_row
from benchmarks.tables import loop_tables
from fp8core.models.architecture import Architecture
from fp8core.models.families import parameter_shapes
from fp8core.models.families.config_json import architecture_to_hf
from fp8core.models.hub import HUB_ARCHITECTURES
from fp8core.models.safetensors_files import INDEX
from fp8core.models.tokenizer import Tokenizer
from fp8core.models.weights import layer_of
from fp8core.report.run_data import RunData, read_run
from fp8core.rl.alignment_metrics import TMPE
from fp8core.store.artifacts import ArtifactStore
from fp8core.store.layout import LEDGER
from fp8core.store.ledger import START, LedgerView
from fp8core.store.metrics import series

VARIANTS = ("bf16", "fp8_end_to_end_kv")
SOURCES = ("pass", "training", "rollout")
RESULT = "large_ledger"
PREDICTION = Path(__file__).with_name(f"{RESULT}_prediction.json")
QWEN3_8B = HUB_ARCHITECTURES["Qwen/Qwen3-8B-Base"]
# Of experts as many layers as a GPU can train.
MODELS = {"qwen3-8b": QWEN3_8B, "qwen3-30b-a3b": replace(HUB_ARCHITECTURES["Qwen/Qwen3-30B-A3B"], num_layers=12)}
_SHOWN = 12_000

_COMMON = {
    "data.source": "chain",
    "reward.verifier": "benchmarks.random_reward:score",
    "evaluation": {"every": 1_000_000, "prompts": 1},
    "checkpoint.every": 1_000_000,
}
_SIZES = {
    # In BF16 a cache for 256 completions did not fit beside the trainer.
    "cuda": {"rollout.prompts_per_step": 24, "rollout.group_size": 8, "rollout.max_new_tokens": 1024},
    "cpu": {
        **{"rollout.prompts_per_step": 2, "rollout.group_size": 4, "rollout.max_new_tokens": 8},
        **{"rollout.engine": "embedded", "rollout.vllm.sleep": False, "precision.rounding_points": "stepwise"},
        **{"training.device": "cpu", "training.packed": True, "threads": 1},
    },
}
# Room for as many tokens in either format: all completions with their prompts, which those of a group share.
_CACHE_GIB = {"bf16": 28.5, "fp8_end_to_end_kv": 14.5}
# SGLang has our model in FP8 alone.
_ENGINES = {
    "vllm": {},
    "sglang": {
        "rollout.engine": "sglang",
        "rollout.sglang": {"model": "aligned", "page_size": 64, "sleep": True, "context_length": 2048}
        | {"mem_fraction_static": 0.4, "kv_cache_gib": _CACHE_GIB["fp8_end_to_end_kv"]},
    },
}
_DEVIATION = 0.02
_SEED = 0
_END, _PAD = "<|im_end|>", "<|endoftext|>"
# Layers of a shard: some 1.5 GB of Qwen3-8B, the part that lies on the host at a time.
_SHARD_LAYERS = 4


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the model, train what is not done, write rows and table; returns 0 when all have their steps, else 1."""
    options = _options(arguments)
    end, out = time.monotonic() + options.seconds, options.out.absolute()
    (out / "logs").mkdir(parents=True, exist_ok=True)
    arch, began = architecture(options), time.monotonic()
    model = out / f"model-{options.device}-{arch.num_layers}"
    make_model(model, arch, options.device)
    print(f"model: {time.monotonic() - began:.0f} s", flush=True)
    trainings = {
        (variant, source): training(model, variant, source, options) for variant in VARIANTS for source in SOURCES
    }
    asked = [(variant, options.logprobs) for variant in options.variants]
    for chosen in map(trainings.__getitem__, asked):
        if not committed(chosen, options.steps):
            train(chosen, options.steps, out / "logs" / f"{chosen.folder.name}.log", end)
    done = {case: each for case, each in trainings.items() if committed(each, options.steps)}
    predicted = {
        (each["variant"], each["logprobs"], each["engine"]): each["predicted"]
        for each in json.loads(PREDICTION.read_text())
        if each.get("model", "qwen3-8b") == options.model
    }
    about = {"engine": options.engine}
    rows = [
        row | about | {"logprobs": source, "predicted": predicted.get((row["variant"], source, options.engine))}
        for (_, source), each in done.items()
        if (row := ledger_row(each, options.model, arch)) is not None
    ]
    write_rows(out / f"{RESULT}.json", rows)
    for row in rows:
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in row["seconds_before"].items())
        print(f"{row['variant']}, {row['logprobs']}: seconds before the first step: {parts}", flush=True)
    print(*loop_tables(rows), sep="\n\n", flush=True)
    return 0 if {*asked} <= {*done} else 1


def architecture(options: argparse.Namespace) -> Architecture:
    """A model's shape, or a tiny one of its family for a CPU."""
    shape = MODELS[options.model]
    shape = replace(shape, num_layers=options.layers or shape.num_layers)
    if options.device == "cuda":
        return shape
    small = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_heads": 2, "num_kv_heads": 1}
    experts = shape.experts and replace(shape.experts, count=8, per_token=2, intermediate_size=128)
    return replace(shape, max_positions=1024, experts=experts, **small)


def training(model: Path, variant: str, source: str, options: argparse.Namespace) -> Training:
    """A variant of qwen3-aligned with this model and source of old log-probs."""
    settings = _COMMON | _SIZES[options.device] | {"steps": options.steps + 1, "logprobs.source": source}
    if options.device == "cuda":
        settings |= {"rollout.vllm.kv_cache_gib": _CACHE_GIB[variant], **_ENGINES[options.engine]}
    overrides = [f"model={model}", *(f"{key}={json.dumps(value)}" for key, value in settings.items())]
    (made,) = plan("qwen3-aligned", overrides, [variant], model.parent / "runs")
    # Runs of other models and engines lie beside it.
    return replace(made, folder=made.folder.with_name(f"{made.folder.name}-{source}-{options.engine}-{model.name}"))


def committed(training: Training, steps: int) -> bool:
    """True if a run has `steps` steps."""
    path = training.folder / LEDGER
    last = LedgerView.read(path).last_step() if path.exists() else None
    return last is not None and last >= steps


def train(training: Training, steps: int, log: Path, end: float) -> None:
    """From the beginning to `steps` steps, or until `end` (time.monotonic); prints the output of a shorter run."""
    shutil.rmtree(training.folder, ignore_errors=True)
    began = time.monotonic()
    with log.open("wb") as output:
        code = run_till(training.command, output, lambda: committed(training, steps), end)
    print(f"{training.variant}: ended with {code} after {time.monotonic() - began:.0f} s", flush=True)
    if not committed(training, steps):
        print(log.read_text(errors="replace")[-_SHOWN:], flush=True)


def ledger_row(training: Training, model: str, arch: Architecture) -> Row | None:
    """The ledger of a step, with the size of the model and of the step, and seconds before the first one."""
    run = read_run(training.folder, training.variant)
    row = step_ledger_row(run, training.variant, training.label)
    if row is None:
        return None
    last = run.history[-1]
    # Another place has the model elsewhere.
    row["command"] = row["command"].replace(training.settings[0], "model=FOLDER/model")
    return row | {
        "model": model if arch.vocab_size == QWEN3_8B.vocab_size else "rehearsal",
        "layers": arch.num_layers,
        "requests": round(last["rollout/tokens"] / last["rollout/length_mean"]),
        "prompt_tokens": _prompt_tokens(run),
        "generated_tokens": int(last["rollout/tokens"]),
        "seconds_before": _seconds_before(run),
        "tmpe": list(series(run.history, TMPE.name)[1]),
    }


def _prompt_tokens(run: RunData) -> int:
    """Of all requests of the newest step."""
    last = run.view.steps[max(run.view.steps)]
    rollouts = ArtifactStore(run.view.folder).get_table(last.artifacts["rollouts"])
    return sum(len(tokens) for tokens in rollouts["prompt_tokens"].to_pylist())


def _seconds_before(run: RunData) -> dict[str, float]:
    """Seconds of a run's parts before its first step, in order; reading the model begins with run.json."""
    tasks, first = run.view.steps[START].tasks, run.view.steps[START + 1].tasks
    (segment,) = LedgerView.read(run.view.folder / LEDGER).segments()
    digest, scales, evaluation = (tasks[name] for name in ("warm_start", "calibrate", "evaluate"))
    return {
        "read": segment.started - (run.view.folder / "run.json").stat().st_mtime,
        "digest": digest.seconds,
        "engine_and_trainer": scales.started - digest.started - digest.seconds,
        "first_scales": scales.seconds,
        "first_sync_and_evaluation": evaluation.seconds,
        "second_sync": first["prompts"].started - evaluation.started - evaluation.seconds,
    }


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The ledger of GRPO steps at a real model's shape.")
    parser.add_argument("variants", nargs="*", metavar="VARIANT", help=", ".join(VARIANTS))
    parser.add_argument("--out", type=Path, required=True, help="folder of model, runs and results")
    parser.add_argument("--logprobs", choices=SOURCES, default="pass", help="source of old log-probs (default pass)")
    parser.add_argument("--engine", choices=_ENGINES, default="vllm", help="of rollouts on a GPU (default vllm)")
    parser.add_argument("--seconds", type=float, default=560.0, help="of this call (default 560)")
    parser.add_argument("--steps", type=int, default=3, help="of each run; the first is not counted (default 3)")
    parser.add_argument("--model", choices=MODELS, default="qwen3-8b", help="shape (default qwen3-8b)")
    parser.add_argument("--layers", type=int, help="default: all, or as many as a GPU can train")
    parser.add_argument("--device", choices=tuple(_SIZES), default="cuda")
    options = parser.parse_args(arguments)
    options.variants = options.variants or list(VARIANTS)
    if unknown := {*options.variants} - {*VARIANTS}:
        parser.error(f"{', '.join(sorted(unknown))}: none of {', '.join(VARIANTS)}")
    return options


def make_model(folder: Path, arch: Architecture, device: str, ends: int = 1) -> None:
    """Write the folder if it is not there; in a process of its own, of which nothing stays on a device.

    Args:
        ends: number of tokens that end a completion. Each is drawn about as often as any other token.
    """
    if folder.exists():
        return
    process = get_context("spawn").Process(target=write_model, args=(folder, arch, device, ends))
    process.start()
    process.join()
    if process.exitcode != 0:
        raise RuntimeError(f"{folder}: the model was not written (exit code {process.exitcode})")


def write_model(folder: Path, arch: Architecture, device: str, ends: int = 1) -> None:
    """Norms are 1, everything else is normal with deviation 0.02; the folder appears whole or not at all."""
    partial = folder.with_name(f".{folder.name}.{arch.num_layers}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer(arch.vocab_size, ends)
    tokenizer.save(partial)
    tokens = {"bos_id": None, "eos_ids": tokenizer.eos_ids, "pad_id": tokenizer.pad_id}
    config = architecture_to_hf(arch, **tokens, dtype="bfloat16")
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    shards: dict[str, dict[str, tuple[int, ...]]] = defaultdict(dict)
    for name, shape in parameter_shapes(arch).items():
        layer = layer_of(name)
        shards[name if layer is None else f"layers.{layer // _SHARD_LAYERS}"][name] = shape
    generator = torch.Generator(device).manual_seed(_SEED)
    places = {}
    for shard, shapes in shards.items():
        file = f"{shard}.safetensors"
        save_file({name: _weight(shape, generator) for name, shape in shapes.items()}, partial / file, {"format": "pt"})
        places |= dict.fromkeys(shapes, file)
    (partial / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    partial.rename(folder)


def byte_tokenizer(vocab_size: int, ends: int = 1) -> Tokenizer:
    """A token for each byte and for the end of a text, and unused ones up to the size of the vocabulary.

    Of the unused ones the last `ends` - 1 end a text too.
    """
    known = [*sorted(pre_tokenizers.ByteLevel.alphabet()), _PAD, _END]
    names = [*known, *(f"<unused{i}>" for i in range(vocab_size - len(known)))]
    backend = tokenizers.Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([_PAD, _END])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=_END, pad_token=_PAD)
    more = frozenset(range(vocab_size - ends + 1, vocab_size))
    return Tokenizer(fast, more, "random model")


def _weight(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    weight = torch.ones(shape, dtype=torch.bfloat16, device=generator.device)
    return (weight if len(shape) == 1 else weight.normal_(0, _DEVIATION, generator=generator)).cpu()


if __name__ == "__main__":
    sys.exit(main())
