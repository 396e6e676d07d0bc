"""Measure the Megatron trainer on one Hopper GPU: tokens per second of a step, and parity with other trainers.

    python -m benchmarks.megatron_hopper --out FOLDER [NAME ...]

NAME is MODEL/PRECISION[/deterministic] for speed, parity/FAMILY/PRECISION for parity; without one, all. Every
measurement is a process of its own and writes FOLDER/NAME.json: its rows, or the error that ended it. Without a GPU the
same rows come from small shapes in FP32, to try the script.

Rows of kind `training` have the median of three steps of 64 sequences of 1,024 tokens after one that is not counted.
Rows of kind `trainer_parity` compare log-probs, loss and gradients on equal weights and tokens.
`formats/MODEL` compares the torch trainer in block FP8 with itself in FP32, on any machine: what formats alone change.

Predicted for `smollm2` and `qwen2` in block FP8, whose linears are padded: zeros change nothing. So log-probs are as
far from FP32 as those of Llama in whole tiles, 0.025 nats in the mean (0.02 to 0.04), and gradients 0.07 of their norm.
It gave 0.024 and 0.072 for `qwen2`, and 0.118 and 0.33 for `smollm2`, whose head is tied. Predicted for
`formats/smollm2`: 0.12 and 0.35 with the tied head, as in Megatron, and 0.025 and 0.07 with a head of its own.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from zlib import crc32

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.harness import ROOT, Row, provenance, write_rows
from fp8core.config.capability import this_node
from fp8core.config.load import load_config
from fp8core.config.run import RunConfig
from fp8core.errors import refuse
from fp8core.models.architecture import Architecture, Experts, architecture_to_hf, parameter_shapes
from fp8core.models.checkpoint import initial_weights
from fp8core.models.hub import PUBLISHED
from fp8core.models.weights import reference_formats, rollout_formats, training_formats
from fp8core.processes.variables import set_variables
from fp8core.rl.batch import RolloutBatch, TokenBatch, length_mask
from fp8core.rl.losses import Denominator
from fp8core.rl.objective import Objective
from fp8core.run.step_metrics import torch_threads
from fp8core.training.exact import ExactTrainer
from fp8core.training.megatron.requirements import machine_refusals, required_environment
from fp8core.training.packed.trainer import PackedFormats, PackedTrainer
from fp8core.training.ranks import ALONE
from fp8core.training.registry import packages_of

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
TEMPERATURE = 1.0


@dataclass(frozen=True)
class Case:
    """A model at the depth that one GPU holds with gradients, masters and moments (18 bytes a parameter)."""

    model: str
    layers: int
    sequences: int = 64
    prompt: int = 512
    completion: int = 512

    @property
    def arch(self) -> Architecture:
        """Its shape."""
        return small(self.model) if self.model in _SMALL else replace(PUBLISHED[self.model], num_layers=self.layers)


# Of linears and of the KV cache.
_FORMATS = {"bf16": ("bf16", "bf16"), "fp8": ("fp8_block", "bf16"), "fp32": ("fp32", "fp32")}
if ON_GPU:
    SPEED = {
        "qwen3-8b": Case("Qwen/Qwen3-8B-Base", 24),
        "llama-3.1-8b": Case("meta-llama/Llama-3.1-8B-Instruct", 20),
        "qwen3-30b-a3b": Case("Qwen/Qwen3-30B-A3B", 4),
    }
    PRECISIONS = ("bf16", "fp8")
else:
    # The script itself can be tried anywhere.
    SPEED = {name: Case(name, 2, sequences=8, prompt=24, completion=24) for name in ("qwen3", "qwen3-moe")}
    PRECISIONS = ("fp32",)

_EXPERTS = Experts(count=8, per_token=2, intermediate_size=256, normalise_top_k=True, sparse_step=1, dense_layers=())
_SMALL: dict[str, dict[str, Any]] = {
    "qwen3": {"family": "qwen3", "qk_norm": True},
    "llama": {"family": "llama", "qk_norm": False},
    "qwen3-moe": {"family": "qwen3_moe", "qk_norm": True, "experts": _EXPERTS},
    # Widths of SmolLM2-135M, and one that is no multiple of 64: the linears are padded.
    "smollm2": {
        "family": "llama",
        "qk_norm": False,
        "hidden_size": 576,
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 64,
        "intermediate_size": 1500,
        "tie_embeddings": True,
    },
    # Biases beside padding.
    "qwen2": {
        "family": "qwen2",
        "qk_norm": False,
        "qkv_bias": True,
        "hidden_size": 192,
        "num_heads": 3,
        "num_kv_heads": 1,
        "head_dim": 64,
        "intermediate_size": 384,
    },
}
PARITY = tuple(_SMALL)


def small(family: str) -> Architecture:
    """A policy that the exact trainer still computes on a CPU, with true tiles where the family has no sizes."""
    sizes: dict[str, Any] = {
        "vocab_size": 2048,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_layers": 2,
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_positions": 4096,
        "rope_scaling": None,
        "tie_embeddings": False,
    }
    return Architecture(**{**sizes, **_SMALL[family]})


def configuration(precision: str, *changes: str) -> RunConfig:
    """A run with the Megatron trainer; `precision` is a key of `_FORMATS`."""
    linear, cache = _FORMATS[precision]
    side = f"{{linear: {linear}, kv_cache: {cache}}}"
    trainer = ["training.trainer=megatron", "training.warmup_steps=0", "training.max_grad_norm=1e9"]
    sides = [f"precision.rollout={side}", f"precision.training={side}", "precision.scale_rule=pow2"]
    return load_config("tiny", [*sides, *trainer, *changes])


class RandomPolicy(Mapping[str, Tensor]):
    """Weights that are drawn on the device when they are read: no second copy of a large model exists."""

    def __init__(self, arch: Architecture) -> None:
        self._shapes = parameter_shapes(arch)

    def __getitem__(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16, device=DEVICE)
        generator = torch.Generator(DEVICE).manual_seed(crc32(name.encode()))
        drawn = torch.randn(shape, generator=generator, device=DEVICE, dtype=torch.bfloat16)
        return drawn.mul_(shape[1] ** -0.5)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def small_policy(arch: Architecture) -> dict[str, Tensor]:
    """BF16 values, which every trainer holds exactly; norms that are not all 1."""
    generator = torch.Generator().manual_seed(1)
    weights = initial_weights(arch, seed=0)
    norms = {n: w + 0.2 * torch.randn(w.shape, generator=generator) for n, w in weights.items() if w.dim() == 1}
    return {name: tensor.bfloat16().float() for name, tensor in (weights | norms).items()}


def random_batch(arch: Architecture, sequences: int, prompt: int, completion: int) -> RolloutBatch:
    """Random tokens, log-probs of about a uniform policy and random advantages."""
    generator = torch.Generator().manual_seed(2)
    drawn = torch.randint(2, arch.vocab_size, (sequences, prompt + completion), generator=generator).tolist()
    completions = [row[prompt:] for row in drawn]
    mask = length_mask(completions)
    old = torch.zeros(mask.shape) - torch.tensor(float(arch.vocab_size)).log()
    return RolloutBatch(
        sequences=TokenBatch.of([row[:prompt] for row in drawn], completions),
        mask=mask,
        rollout_logprobs=old,
        old_logprobs=old,
        reference_logprobs=None,
        advantages=torch.randn(sequences, generator=generator),
        keep=torch.ones(sequences, dtype=torch.bool),
    )


def beside(config: RunConfig, arch: Architecture, weights: Mapping[str, Tensor], batch: RolloutBatch) -> RolloutBatch:
    """The batch with the policy's log-probs in FP32. So no ratio lies at a bound of the clip, where a last bit moves
    the gradient by per cents (`gradient_gap`)."""
    stored, objective = rollout_formats(config.precision, arch.num_layers), Objective(config.loss, config.correction)
    formats = reference_formats(arch.num_layers)
    scored = ExactTrainer(arch, weights, formats, stored, config.training, objective)
    logprobs = scored.logprobs(batch.sequences, TEMPERATURE, ()).logprobs
    return replace(batch, rollout_logprobs=logprobs, old_logprobs=logprobs)


@dataclass(frozen=True)
class Computed:
    """A trainer's results of a batch: log-probs [B, C], the loss, and gradients by Hugging Face name, if exposed."""

    logprobs: Tensor
    loss: float
    grad_norm: float
    gradients: Mapping[str, Tensor]


Peer = Callable[[RunConfig, Architecture, Mapping[str, Tensor], RolloutBatch], Computed]


def exact(config: RunConfig, arch: Architecture, weights: Mapping[str, Tensor], batch: RolloutBatch) -> Computed:
    """The torch trainer on the CPU in the same formats, with exact sums."""
    formats = training_formats(config.precision, arch.num_layers)
    return _torch(config, arch, weights, batch, formats)


def in_fp32(config: RunConfig, arch: Architecture, weights: Mapping[str, Tensor], batch: RolloutBatch) -> Computed:
    """The torch trainer on the CPU in FP32: what all formats approximate."""
    return _torch(config, arch, weights, batch, reference_formats(arch.num_layers))


def _torch(
    config: RunConfig, arch: Architecture, weights: Mapping[str, Tensor], batch: RolloutBatch, formats: Any
) -> Computed:
    stored, objective = rollout_formats(config.precision, arch.num_layers), Objective(config.loss, config.correction)
    return _updated(ExactTrainer(arch, weights, formats, stored, config.training, objective), config, batch)


def packed(config: RunConfig, arch: Architecture, weights: Mapping[str, Tensor], batch: RolloutBatch) -> Computed:
    """The torch trainer for packed sequences on this device, in the same formats."""
    formats = PackedFormats(
        training_formats(config.precision, arch.num_layers),
        rollout_formats(config.precision, arch.num_layers),
        longest=arch.max_positions,
        amax_only=True,
    )
    objective = Objective(config.loss, config.correction)
    return _updated(PackedTrainer(arch, weights, formats, config.training, objective, DEVICE), config, batch)


def _updated(trainer: ExactTrainer | PackedTrainer, config: RunConfig, batch: RolloutBatch) -> Computed:
    logprobs = trainer.logprobs(batch.sequences, TEMPERATURE, ()).logprobs
    report = trainer.step(batch, TEMPERATURE, ())
    with tempfile.TemporaryDirectory() as folder:
        trainer.save(Path(folder))
        moments = load_file(Path(folder) / "optimiser.safetensors")
    # The first moment after one update is the gradient, times 1 - beta1.
    share = 1 - config.training.beta1
    gradients = {n.removeprefix("exp_avg/"): m / share for n, m in moments.items() if n.startswith("exp_avg/")}
    return Computed(logprobs, report.loss, report.grad_norm, gradients)


def transformers(config: RunConfig, arch: Architecture, weights: Mapping[str, Tensor], batch: RolloutBatch) -> Computed:
    """Hugging Face's model on this device: in FP32 for the CPU's precision, in BF16 for the others."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = architecture_to_hf(arch, bos_id=None, eos_ids=[1], pad_id=None, dtype="float32")
    described = AutoConfig.for_model(**settings)
    dtype = torch.float32 if config.precision.training.linear == "fp32" else torch.bfloat16
    model = AutoModelForCausalLM.from_config(described, dtype=dtype, attn_implementation="sdpa").to(DEVICE)
    # A tied head is no weight of its own.
    model.load_state_dict(hugging_face_names(model, weights), strict=not arch.tie_embeddings)
    sequences, tokens = batch.sequences, batch.sequences.tokens.to(DEVICE)
    logits = model(input_ids=tokens, attention_mask=sequences.valid.long().to(DEVICE)).logits[:, :-1].float()
    chosen = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1).cpu()
    logprobs = torch.zeros(batch.mask.shape).masked_scatter(batch.mask, chosen[sequences.completion[:, 1:]])
    objective = Objective(config.loss, config.correction)
    corrected, _ = objective.corrected(batch)
    terms = objective(logprobs, corrected, Denominator.of(batch.mask))
    terms.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    norm = sum(float(gradient.double().square().sum()) for gradient in gradients.values()) ** 0.5
    return Computed(logprobs.detach(), float(terms.loss.detach()), norm, gradients)


def hugging_face_names(model: Any, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The policy by the model's own names: transformers 5 holds experts stacked."""
    found = dict(weights)
    for name, parameter in model.named_parameters():
        if name not in found:
            prefix, _, part = name.rpartition(".experts.")
            count = parameter.shape[0]
            parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
            stacked = [[found.pop(f"{prefix}.experts.{e}.{p}.weight") for p in parts] for e in range(count)]
            found[name] = torch.stack([torch.cat(each) for each in stacked])
    return {name: tensor.to(DEVICE) for name, tensor in found.items()}


_PEERS: dict[str, Peer] = {"torch, the same formats": exact, "torch, FP32": in_fp32, "transformers": transformers}


def peer_trainers(arch: Architecture) -> dict[str, Peer]:
    """Trainers to compare with; the one for packed sequences has no experts."""
    return _PEERS | ({"torch, packed": packed} if ON_GPU and not arch.sparse_layers else {})


_MICRO_BATCH = 16384 if ON_GPU else 128
_THREADS = 4


def measurements() -> dict[str, Callable[[], list[Row]]]:
    """Everything that can be measured here, by name."""
    speed = {
        f"{name}/{precision}{'/deterministic' if exact else ''}": partial(speed_rows, name, precision, exact)
        for name in SPEED
        for precision in PRECISIONS
        for exact in (False, True)
    }
    parity = {
        f"parity/{family}/{precision}": partial(parity_rows, family, precision)
        for family in PARITY
        for precision in PRECISIONS
    }
    return {**parity, **{f"formats/{family}": partial(format_rows, family) for family in PARITY}, **speed}


def megatron(config: RunConfig, arch: Architecture, weights: Mapping[str, Tensor]) -> Any:
    """A trainer of this process; Transformer Engine reads the environment when it is imported."""
    refuse(machine_refusals(config, this_node(packages_of(config))))
    set_variables({**required_environment(config), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}, {})
    from fp8core.training.megatron.trainer import process_trainer

    return process_trainer(config, arch, weights, ALONE)


def speed_rows(name: str, precision: str, deterministic: bool) -> list[Row]:
    """Tokens per second of scoring and of a whole step, and the memory of the peak."""
    case = SPEED[name]
    recompute = "full" if ON_GPU else "none"
    spread = [f"training.megatron.micro_batch_tokens={_MICRO_BATCH}", f"training.megatron.recompute={recompute}"]
    spread.append(f"training.deterministic={str(deterministic).lower()}")
    config = configuration(precision, *spread)
    trainer = megatron(config, case.arch, RandomPolicy(case.arch))
    batch = random_batch(case.arch, case.sequences, case.prompt, case.completion)
    tokens = int(batch.sequences.valid.sum())
    scoring = [timed(lambda: trainer.logprobs(batch.sequences, TEMPERATURE, ())) for _ in range(4)]
    reports: list[Any] = []
    steps = [timed(lambda: reports.append(trainer.step(batch, TEMPERATURE, ()))) for _ in range(4)]
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
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if ON_GPU else None,
        "loss": reports[-1].loss,
        "grad_norm": reports[-1].grad_norm,
        "describe": trainer.describe(),
    }
    return [row]


def timed(work: Callable[[], object]) -> float:
    """Seconds until the device has done it."""
    began = time.perf_counter()
    work()
    if ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def parity_rows(family: str, precision: str) -> list[Row]:
    """Against every other trainer, and against itself: a second time from the start."""
    config = configuration(precision, f"training.megatron.micro_batch_tokens={_MICRO_BATCH}")
    arch = small(family)
    weights = small_policy(arch)
    batch = beside(config, arch, weights, random_batch(arch, sequences=8, prompt=40, completion=88))
    own = computed(config, arch, weights, batch)
    again = computed(config, arch, weights, batch)
    # The exact trainer computes on the CPU, with fewer threads than a busy host has cores.
    with torch_threads(_THREADS):
        peers = {name: peer(config, arch, weights, batch) for name, peer in peer_trainers(arch).items()}
    return [
        difference(family, precision, name, own, other, batch.mask)
        for name, other in [*peers.items(), ("itself", again)]
    ]


def format_rows(family: str) -> list[Row]:
    """The torch trainer in block FP8 against FP32; a tied head also as one of its own."""
    config, shapes, rows = configuration("fp8"), {family: small(family)}, list[Row]()
    if shapes[family].tie_embeddings:
        shapes[f"{family}, own head"] = replace(shapes[family], tie_embeddings=False)
    for name, shape in shapes.items():
        weights = small_policy(shape)
        batch = beside(config, shape, weights, random_batch(shape, sequences=8, prompt=40, completion=88))
        in_fp8, reference = (peer(config, shape, weights, batch) for peer in (exact, in_fp32))
        row = difference(name, "fp8", "torch, FP32; both are torch", in_fp8, reference, batch.mask)
        rows.append({**row, "trainer": "torch, the same formats"})
    return rows


def computed(config: RunConfig, arch: Architecture, weights: Mapping[str, Tensor], batch: Any) -> Computed:
    """Megatron's results of a batch."""
    trainer = megatron(config, arch, weights)
    logprobs = trainer.logprobs(batch.sequences, TEMPERATURE, ()).logprobs
    loss, gradients = trainer.gradients(batch, TEMPERATURE)
    norm = sum(float(gradient.double().square().sum()) for gradient in gradients.values()) ** 0.5
    return Computed(logprobs, loss, norm, gradients)


def difference(family: str, precision: str, against: str, own: Computed, other: Computed, mask: Tensor) -> Row:
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
    began = time.perf_counter()
    try:
        rows = measurements()[name]()
    except Exception:  # noqa: BLE001 - whatever ends a measurement is its result
        rows = [{"kind": "error", "error": traceback.format_exc()}]
    about = {"name": name, "seconds": time.perf_counter() - began, **provenance()}
    write_rows(path, [{**row, **about} for row in rows])
    for row in rows:
        print(json.dumps({key: value for key, value in row.items() if key != "describe"}), flush=True)


if __name__ == "__main__":
    main()
