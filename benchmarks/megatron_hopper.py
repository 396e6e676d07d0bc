"""Measure the Megatron trainer on one Hopper GPU: tokens per second of a step, and parity with other trainers.

    python -m benchmarks.megatron_hopper --out FOLDER [NAME ...]

NAME is MODEL/PRECISION[/deterministic] for speed, parity/FAMILY/PRECISION for parity; without one, all. Every
measurement is a process of its own and writes FOLDER/NAME.json: its rows, or the error that ended it. Without a GPU the
same rows come from small shapes in FP32, to try the script.

Rows of kind `training` have the median of three steps of 64 sequences of 1,024 tokens after one that is not counted.
Rows of kind `trainer_parity` compare log-probs, loss and gradients on equal weights and tokens.
"""

import argparse
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks import megatron_cases as cases
from flows.environment import set_variables
from fp8core.config.capability import this_platform
from fp8core.config.run import RunConfig
from fp8core.models.architecture import Architecture
from fp8core.store.versions import git_state, hardware, library_versions
from fp8core.training.megatron.requirements import check_requirements, required_environment
from tasks.record import torch_threads

ROOT = Path(__file__).parents[1]
Row = dict[str, Any]
_MICRO_BATCH = 16384 if cases.ON_GPU else 128
_THREADS = 4


def measurements() -> dict[str, Callable[[], list[Row]]]:
    """Everything that can be measured here, by name."""
    speed = {
        f"{name}/{precision}{'/deterministic' if exact else ''}": partial(speed_rows, name, precision, exact)
        for name in cases.SPEED
        for precision in cases.PRECISIONS
        for exact in (False, True)
    }
    parity = {
        f"parity/{family}/{precision}": partial(parity_rows, family, precision)
        for family in cases.PARITY
        for precision in cases.PRECISIONS
    }
    return {**parity, **speed}


def megatron(config: RunConfig, arch: Architecture, weights: Mapping[str, Tensor]) -> Any:
    """A trainer of this process; Transformer Engine reads the environment when it is imported."""
    check_requirements(config, this_platform())
    set_variables({**required_environment(config), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}, {})
    from fp8core.training.megatron.build import process_trainer

    return process_trainer(config, arch, weights, cases.DEVICE)


def speed_rows(name: str, precision: str, deterministic: bool) -> list[Row]:
    """Tokens per second of scoring and of a whole step, and the memory of the peak."""
    case = cases.SPEED[name]
    recompute = "full" if cases.ON_GPU else "none"
    spread = [f"training.megatron.micro_batch_tokens={_MICRO_BATCH}", f"training.megatron.recompute={recompute}"]
    spread.append(f"training.deterministic={str(deterministic).lower()}")
    config = cases.configuration(precision, *spread)
    trainer = megatron(config, case.arch, cases.RandomPolicy(case.arch))
    batch = cases.random_batch(case.arch, case.sequences, case.prompt, case.completion)
    tokens = int(batch.sequences.valid.sum())
    scoring = [timed(lambda: trainer.logprobs(batch.sequences, cases.TEMPERATURE, None)) for _ in range(4)]
    reports: list[Any] = []
    steps = [timed(lambda: reports.append(trainer.step(batch, cases.TEMPERATURE, None))) for _ in range(4)]
    scored, step = median(scoring[1:]), median(steps[1:])
    row = {
        "kind": "training",
        "trainer": "megatron",
        "model": name,
        "layers": case.arch.num_layers,
        "precision": precision,
        "tokens": tokens,
        "micro_batch_tokens": _MICRO_BATCH,
        "recompute": recompute,
        "deterministic": deterministic,
        "logprob_seconds": scored,
        "logprob_tokens_per_second": tokens / scored,
        "step_seconds": step,
        "step_tokens_per_second": tokens / step,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cases.ON_GPU else None,
        "loss": reports[-1].loss,
        "grad_norm": reports[-1].grad_norm,
        "describe": trainer.describe(),
    }
    return [row]


def timed(work: Callable[[], object]) -> float:
    """Seconds until the device has done it."""
    began = time.perf_counter()
    work()
    if cases.ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def parity_rows(family: str, precision: str) -> list[Row]:
    """Against every other trainer, and against itself: a second time from the start."""
    config = cases.configuration(precision, f"training.megatron.micro_batch_tokens={_MICRO_BATCH}")
    arch = cases.small(family)
    weights = cases.small_policy(arch)
    batch = cases.beside(config, arch, weights, cases.random_batch(arch, sequences=8, prompt=40, completion=88))
    own = computed(config, arch, weights, batch)
    again = computed(config, arch, weights, batch)
    # The exact trainer computes on the CPU, with fewer threads than a busy host has cores.
    with torch_threads(_THREADS):
        peers = {name: peer(config, arch, weights, batch) for name, peer in cases.peers(arch).items()}
    return [
        difference(family, precision, name, own, other, batch.mask)
        for name, other in [*peers.items(), ("itself", again)]
    ]


def computed(config: RunConfig, arch: Architecture, weights: Mapping[str, Tensor], batch: Any) -> cases.Computed:
    """What Megatron makes of a batch."""
    trainer = megatron(config, arch, weights)
    logprobs = trainer.logprobs(batch.sequences, cases.TEMPERATURE, None).logprobs
    loss, gradients = trainer.gradients(batch, cases.TEMPERATURE)
    norm = sum(float(gradient.double().square().sum()) for gradient in gradients.values()) ** 0.5
    return cases.Computed(logprobs, loss, norm, gradients)


def difference(
    family: str, precision: str, against: str, own: cases.Computed, other: cases.Computed, mask: Tensor
) -> Row:
    """Differences of log-probs and loss; of gradients the norm of the difference over the norm of the other's."""
    apart = (own.logprobs - other.logprobs)[mask].abs()
    shared = {
        name: (own.gradients[name].float().cpu(), gradient.float().cpu())
        for name, gradient in other.gradients.items()
        if name in own.gradients
    }
    return {
        "kind": "trainer_parity",
        "trainer": "megatron",
        "against": against,
        "model": family,
        "precision": precision,
        "logprob_max": float(apart.max()),
        "logprob_mean": float(apart.mean()),
        "loss": own.loss,
        "loss_difference": own.loss - other.loss,
        "grad_norm": own.grad_norm,
        "grad_norm_difference": own.grad_norm - other.grad_norm,
        "gradients_compared": len(shared),
        **gradient_difference(shared),
    }


def gradient_difference(shared: Mapping[str, tuple[Tensor, Tensor]]) -> Row:
    """Of all together, and of the parameter whose gradient differs most; nothing where names are not shared."""
    if not shared:
        return {}
    relative = {name: float((a - b).norm() / b.norm().clamp_min(1e-30)) for name, (a, b) in shared.items()}
    worst = max(relative, key=lambda name: relative[name])
    total = sum(float((a - b).square().sum()) for a, b in shared.values()) ** 0.5
    norm = sum(float(b.square().sum()) for _, b in shared.values()) ** 0.5
    return {
        "gradient_relative": total / norm,
        "gradient_worst": relative[worst],
        "gradient_worst_name": worst,
    }


def main() -> None:
    """Start a process for each measurement, or be one (`--here`)."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", choices=[[], *measurements()])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--here", action="store_true", help="in this process")
    options = parser.parse_args()
    for name in options.names or measurements():
        if options.here:
            measure(name, options.out)
        else:
            command = [sys.executable, "-m", "benchmarks.megatron_hopper", "--here", "--out", str(options.out), name]
            subprocess.run(command, cwd=ROOT, check=False)


def measure(name: str, out: Path) -> None:
    """Write what came out, an error too."""
    path = out / f"{name.replace('/', '-')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    try:
        rows = measurements()[name]()
    except Exception:  # noqa: BLE001 - whatever ends a measurement is its result
        rows = [{"kind": "error", "name": name, "error": traceback.format_exc()}]
    about = {"git": git_state(ROOT), "hardware": hardware(), "libraries": library_versions()}
    path.write_text(json.dumps({"name": name, "seconds": time.perf_counter() - began, "rows": rows, **about}, indent=1))
    for row in rows:
        print(json.dumps({key: value for key, value in row.items() if key != "describe"}), flush=True)


if __name__ == "__main__":
    main()
