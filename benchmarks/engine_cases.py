"""Shapes, policies and requests of the engine that benchmarks of rollouts measure."""

import gc
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from statistics import median, median_low
from typing import Any

import psutil
import torch
from torch import Tensor

from flows.environment import kernel_folders
from fp8core.config.capability import this_platform
from fp8core.config.engines import VllmConfig
from fp8core.config.loss import LossConfig
from fp8core.config.precision import PrecisionContract, SidePrecision, TrainingPrecision
from fp8core.config.training import CorrectionConfig, TrainingConfig
from fp8core.kernels.compilation import Job, missing_jobs, run_jobs
from fp8core.models.architecture import Architecture, padded_vocabulary
from fp8core.models.checkpoint import initial_weights
from fp8core.models.families import parameter_shapes
from fp8core.models.hub import HUB_ARCHITECTURES
from fp8core.models.weights import SCALE_SUFFIX, layer_of, rollout_formats, training_formats
from fp8core.numerics.fingerprint import policy_digest
from fp8core.numerics.kv_scales import LayerScales, scales_from_statistics
from fp8core.numerics.recipe import RecipeName
from fp8core.processes.variables import set_variables
from fp8core.resources.kernels import Product, layer_products, shared_out
from fp8core.rl.batch import TokenBatch
from fp8core.rl.objective import Objective
from fp8core.rollout.aligned import POINTS
from fp8core.rollout.engine import Completion, PolicyScales, PromptGroup, Sampling, sample_seed
from fp8core.rollout.requirements import EngineBuild
from fp8core.rollout.vllm.entry import find_build
from fp8core.rollout.vllm.settings import WORKER, required_environment, suggested_environment
from fp8core.run.compilation import product_job
from fp8core.run.policy import check_report
from fp8core.training.exact import ExactTrainer

# Tokens of the probe: its prompt is not a multiple of a cache block.
_PROBE_PROMPT, _PROBE_TOKENS = 300, 64
_OF_A_RUN = ("seconds", "tokens_per_s", "step_ms", "collections", "processors")
_NOTHING_STOPS: frozenset[int] = frozenset()

_SMALL: dict[str, Any] = {
    "family": "qwen3",
    "vocab_size": 2048,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_layers": 4,
    "num_heads": 16,
    "num_kv_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "max_positions": 4096,
    "rope_scaling": None,
    "tie_embeddings": False,
}
_QWEN3_8B = {"vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 12_288, "num_heads": 32}


@dataclass(frozen=True)
class Policy:
    """Tensors on the GPU as a trainer ships them; a small policy has its trainer, and weights on the CPU as well."""

    arch: Architecture
    tensors: Mapping[str, Tensor]
    scales: PolicyScales
    trainer: ExactTrainer | None = None
    masters: Mapping[str, Tensor] = field(default_factory=dict)


def build() -> EngineBuild:
    """The vLLM of this machine."""
    return find_build(this_platform())


def prepare(agreed: PrecisionContract, settings: VllmConfig) -> None:
    """Environment of the engine."""
    found = build()
    set_variables(required_environment(agreed, settings, found), suggested_environment(1, found))


def contract(precision: str) -> PrecisionContract:
    """`bf16`, `fp8_linear` or `fp8_linear_kv`, for both sides, by powers of two; FP32 head."""
    parts: dict[str, Any] = {
        "linear": "bf16" if precision == "bf16" else "fp8_block",
        "kv_cache": "fp8" if precision == "fp8_linear_kv" else "bf16",
    }
    return PrecisionContract(rollout=SidePrecision(**parts), training=TrainingPrecision(**parts), scale_rule="pow2")


def aligned(agreed: PrecisionContract, rule: RecipeName = "fp32_activations") -> PrecisionContract:
    """The same by another rule, rounded as the engine whose layers are the trainer's (`options(model="aligned")`)."""
    return agreed.model_copy(update={"rounding_points": POINTS, "scale_rule": rule})


def options(**changes: Any) -> VllmConfig:
    """Settings that leave room for other engines on the GPU, unless changed."""
    return VllmConfig(**{"gpu_memory_utilization": 0.15, "max_model_len": 4096, **changes})


def qwen3_8b(layers: int) -> Architecture:
    """Qwen3-8B with fewer layers, or all 36."""
    return Architecture(**{**_SMALL, **_QWEN3_8B, "num_layers": layers, "max_positions": 40_960})


def qwen3_30b_a3b(layers: int = 48) -> Architecture:
    """Qwen3-30B-A3B with fewer layers, or all."""
    return replace(HUB_ARCHITECTURES["Qwen/Qwen3-30B-A3B"], num_layers=layers)


def llama_8b() -> Architecture:
    """Llama-3.1-8B."""
    changed = {"family": "llama", "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336}
    changed |= {"num_layers": 32, "num_heads": 32, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0}
    return Architecture(**{**_SMALL, **changed, "max_positions": 131_072})


def compile_products(arch: Architecture, agreed: PrecisionContract, most: int) -> None:
    """DeepGEMM's kernels of steps of up to `most` tokens, on all processors: one after another they take minutes."""
    if agreed.rollout.linear == "fp8_block":
        rows = range(1, most + 1)
        head = Product("bf16", padded_vocabulary(arch.vocab_size), arch.hidden_size, rows)
        run_missing([product_job(each, kernel_folders()) for each in shared_out([*layer_products(arch, rows), head])])


def compile_pass(products: Iterable[Product], more: Iterable[Job] = ()) -> None:
    """As `compile_products`, of the last number of rows of each, and `more` jobs beside them."""
    last = (replace(product, rows=product.rows[-1:]) for product in products)
    run_missing([*more, *(product_job(product, kernel_folders()) for product in last)])


def run_missing(jobs: Sequence[Job]) -> None:
    gpu = torch.cuda.get_device_name()
    if missing := missing_jobs(jobs, gpu):
        run_jobs(missing, gpu, lambda done, jobs: None)


def start(
    arch: Architecture,
    agreed: PrecisionContract,
    settings: VllmConfig,
    max_batch: int,
    rows: list[Any],
    worker: str = WORKER,
    draft_tokens: int = 0,
) -> Any:
    """An engine, and a row with the seconds until it was ready."""
    from fp8core.rollout.vllm.engine import VllmEngine

    began = time.perf_counter()
    engine = VllmEngine(arch, agreed, settings, max_batch, build(), worker=worker, draft_tokens=draft_tokens)
    rows.append({"kind": "start", "layers": arch.num_layers, "seconds": round(time.perf_counter() - began, 1)})
    return engine


def small_policy(agreed: PrecisionContract, version: int) -> Policy:
    """Random weights with true tiles, quantised by the trainer; scales calibrated on random prompts."""
    arch = Architecture(**_SMALL)
    masters = {n: w * 2 if w.dim() == 2 else w for n, w in initial_weights(arch, seed=version).items()}
    formats = training_formats(agreed, arch.num_layers), rollout_formats(agreed, arch.num_layers)
    trainer = ExactTrainer(arch, masters, *formats, TrainingConfig(), Objective(LossConfig(), CorrectionConfig()))
    prompts = [list(group.prompt) for group in prompt_groups(4, 1, 32, seed=100)]
    amax = trainer.statistics(TokenBatch.of(prompts, [[5]] * len(prompts))).amax()
    layers = tuple(scales_from_statistics(amax, 2.0, agreed.recipe.cache))
    tensors = {name: tensor.cuda() for name, tensor in trainer.export().items()}
    return Policy(arch, tensors, PolicyScales(version, layers), trainer, masters)


def random_policy(arch: Architecture, agreed: PrecisionContract, own_layers: int) -> Policy:
    """Random bytes of the right types, made on the GPU: codes of spread 100 with scales of 2^-13.

    Layers from `own_layers` on share the tensors of those before, where memory is short: of a model with experts
    theirs alone. With all equal, every token would end at the same few experts.
    """
    names = rollout_formats(agreed, arch.num_layers).stored_names()
    tensors: dict[str, Tensor] = {}
    torch.manual_seed(0)
    for name, shape in parameter_shapes(arch).items():
        layer = layer_of(name)
        is_shared = arch.experts is None or ".experts." in name
        if layer is not None and layer >= own_layers and is_shared:
            twin = name.replace(f"layers.{layer}.", f"layers.{layer % own_layers}.")
            tensors |= {name + end: tensors[twin + end] for end in ("", SCALE_SUFFIX) if twin + end in tensors}
            continue
        drawn = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        if len(shape) == 1:
            tensors[name] = torch.ones_like(drawn)
        elif names.of(name) == "fp8_block":
            tensors[name] = (drawn * 100).clamp_(-448, 448).to(torch.float8_e4m3fn)
            tensors[name + SCALE_SUFFIX] = torch.full([size // 128 for size in shape], 2.0**-13, device="cuda")
        else:
            tensors[name] = drawn * 0.012
    layers = tuple(LayerScales(0.25, 0.25, 0.25) for _ in range(arch.num_layers))
    return Policy(arch, tensors, PolicyScales(0, layers))


def synchronise(engine: Any, policy: Policy) -> dict[str, Any]:
    """Update and prove it (`check_report`): bytes, seconds of both together and of the read-back alone."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    report = engine.update(policy.tensors, policy.scales, policy.scales.version)
    updated = time.perf_counter()
    digest = engine.fingerprint()
    read = time.perf_counter()
    for expected in (digest, policy_digest(policy.tensors)):
        check_report(report, expected, policy.scales, policy.scales.version)
    size = sum(tensor.nbytes for tensor in policy.tensors.values())
    seconds = {"seconds": round(updated - began, 4), "readback_seconds": round(read - updated, 4)}
    return {"bytes": size, "tensors": len(policy.tensors), **seconds}


def summary(described: dict[str, Any]) -> dict[str, Any]:
    """An engine's report of itself, without its lists by parameter."""
    return {key: value for key, value in described.items() if key not in ("dtypes", "scales", "linear")} | {
        "linear": "+".join(dict.fromkeys(described["linear"]))
    }


def exactness_rows(
    start_engine: Callable[[int], Any], policy: Policy, batch_invariant: bool
) -> Iterator[dict[str, Any]]:
    """The probe in other surroundings against the probe alone.

    `start_engine` makes an engine of so many sequences: one of many, then one of two.
    """
    with closing(start_engine(256)) as engine:
        synchronise(engine, policy)
        alone = _probe(engine, [])
        for found, surroundings in _probes(engine, policy):
            yield compared(alone, found, surroundings, batch_invariant)
    with closing(start_engine(2)) as pair:
        synchronise(pair, policy)
        yield compared(alone, _probe(pair, []), "alone, engine of two", batch_invariant)
        yield compared(alone, *_probe_joined(pair, policy), batch_invariant)


def _probes(engine: Any, policy: Policy) -> Iterator[tuple[Completion, str]]:
    """The probe in other surroundings; only the first time, its prompt is in the cache."""
    yield _probe(engine, []), "alone, its prompt cached"
    beside = {
        "among 255 of its length": (prompt_groups(255, 1, _PROBE_PROMPT, seed=2), 0),
        "among 255 of 900 tokens": (prompt_groups(255, 1, 900, seed=3), 0),
        "first of 8 that share its prompt": ([], 7),
        "alone, after others": ([], 0),
    }
    for surroundings, (others, copies) in beside.items():
        synchronise(engine, policy)  # empties the cache
        yield _probe(engine, others, copies), surroundings


def _probe_joined(engine: Any, policy: Policy) -> tuple[Completion, str]:
    """The probe on an engine of two sequences: when its neighbour ends, the prefill of 3,000 tokens joins it.

    The neighbour is ended by one of its own tokens, known from a run of its own, that the probe does not write.
    """
    neighbour, long = prompt_groups(1, 1, 40, seed=4)[0], prompt_groups(1, 1, 3000, seed=5)[0]
    sampling = Sampling(1.0, _PROBE_TOKENS, _NOTHING_STOPS)
    own = {
        token for group in (_probe_group(0), _renumbered(long, 2)) for token in _first(engine, [group], sampling).tokens
    }
    ending = next(token for token in _first(engine, [neighbour], sampling).tokens[12:] if token not in own)
    groups = [_probe_group(0), _renumbered(neighbour, 1), _renumbered(long, 2)]
    synchronise(engine, policy)  # empties the cache
    found = collect(engine, groups, replace(sampling, stop_ids=frozenset({ending})))
    return found[0], f"a prefill of 3,000 tokens joins after {len(found[1].tokens)} of its tokens"


def _probe(engine: Any, others: list[PromptGroup], copies: int = 0) -> Completion:
    beside = [_renumbered(group, i + 1) for i, group in enumerate(others)]
    return _first(engine, [_probe_group(copies), *beside], Sampling(1.0, _PROBE_TOKENS, _NOTHING_STOPS))


def _probe_group(copies: int) -> PromptGroup:
    return prompt_groups(1, 1 + copies, _PROBE_PROMPT, seed=6)[0]


def _first(engine: Any, groups: list[PromptGroup], sampling: Sampling) -> Completion:
    return collect(engine, groups, sampling)[0]


def compared(alone: Completion, found: Completion, surroundings: str, batch_invariant: bool) -> dict[str, Any]:
    """Tokens and log-probs against those of the probe alone."""
    pairs = list(zip(alone.tokens, found.tokens, strict=False))
    equal = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    differences = [abs(a - b) for a, b in zip(alone.logprobs[:equal], found.logprobs[:equal], strict=True)]
    return {
        "kind": "exactness",
        "surroundings": surroundings,
        "batch_invariant": batch_invariant,
        "tokens": len(alone.tokens),
        "equal_tokens": equal,
        "equal_logprobs": sum(difference == 0 for difference in differences),
        "largest_difference": max(differences, default=None),
    }


def timed_rollout(
    engine: Any, requests: int, prompt: int, generated: int, seed: int, stop_ids: frozenset[int] = _NOTHING_STOPS
) -> dict[str, Any]:
    """One batch of requests, each with a prompt of its own; all generate the same length where nothing stops them."""
    # Another shape has other prompts: the first of many would be found in the cache by few.
    groups = prompt_groups(requests, 1, prompt, seed=100_000 * requests + 10 * generated + seed)
    with processor_shares() as shares, garbage_collections() as collected:
        found, steps = timed(session_steps(engine, groups, Sampling(1.0, generated, stop_ids)))
    seconds = sum(steps)
    tokens = sum(len(done.tokens) for done in found)
    assert stop_ids or tokens == requests * generated, "a request was cut short"
    sizes = {"requests": requests, "prompt": prompt, "generated": generated, "tokens": tokens}
    speed = {"seconds": round(seconds, 3), "tokens_per_s": round(tokens / seconds, 1)}
    waits = {"step_ms": by_quarter(steps), "collections": collected(), "processors": shares()[:3]}
    return {**sizes, **speed, **waits}


def prompt_groups(prompts: int, size: int, length: int, seed: int) -> list[PromptGroup]:
    """Prompts of one length, of tokens that every vocabulary here has."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(4, _SMALL["vocab_size"], (prompts, length), generator=generator).tolist()
    return [
        PromptGroup(
            group=i,
            prompt_id=f"{seed}-{i}",
            prompt=tuple(tokens),
            samples=tuple(range(size)),
            seeds=tuple(sample_seed(seed, 1, i, sample) for sample in range(size)),
        )
        for i, tokens in enumerate(drawn)
    ]


def _renumbered(group: PromptGroup, number: int) -> PromptGroup:
    return replace(group, group=number)


def collect(engine: Any, groups: list[PromptGroup], sampling: Sampling) -> list[Completion]:
    found = [done for finished in engine.generate(groups, sampling) for done in finished]
    return sorted(found, key=lambda done: (done.group, done.sample))


QUARTERS = 4
BUSIEST = 3


def session_steps(engine: Any, groups: list[PromptGroup], sampling: Sampling) -> Iterator[list[Completion]]:
    """What each step of the engine finishes, mostly nothing."""
    with closing(engine.open_session(sampling)) as session:
        session.add(groups)
        while session.busy:
            yield session.step()


def timed(steps: Iterable[Sequence[Completion]]) -> tuple[list[Completion], list[float]]:
    """The completions of a rollout (`session_steps`), and the seconds from each step to the next."""
    found, seconds, last = list[Completion](), list[float](), time.perf_counter()
    for finished in steps:
        now = time.perf_counter()
        found += finished
        seconds.append(now - last)
        last = now
    return found, seconds


def by_quarter(seconds: Sequence[float]) -> list[dict[str, float]]:
    """Milliseconds of the steps of each quarter of a rollout: the median, that of one in a hundred, and the largest."""
    ends = [len(seconds) * quarter // QUARTERS for quarter in range(QUARTERS + 1)]
    return [_summary(sorted(seconds[start:end])) for start, end in itertools.pairwise(ends) if end > start]


@contextmanager
def processor_shares() -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Load of this process and its children inside the block, available after it.

    A row a process, the busiest first, in shares of one processor: `all` of its threads, and its busiest `threads`.
    None of the latter can exceed 1. An engine whose scheduling thread is near 1 waits for a processor and not for its
    GPU. `all` near 1 with no thread near it is a lock that threads share. A process that ends inside the block has no
    row.
    """
    started = dict[psutil.Process, dict[int, float]]()
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            started[process] = _thread_seconds(process)
    began = time.perf_counter()
    found = list[dict[str, Any]]()
    yield lambda: found
    elapsed = time.perf_counter() - began
    for process, earlier in started.items():
        with suppress(psutil.NoSuchProcess):
            spent = {i: seconds - earlier.get(i, 0.0) for i, seconds in _thread_seconds(process).items()}
            found.append({"process": _name(process), **_shares([seconds / elapsed for seconds in spent.values()])})
    found.sort(key=lambda row: row["all"], reverse=True)


@contextmanager
def garbage_collections() -> Iterator[Callable[[], dict[str, Any]]]:
    """Time of Python's garbage collector in this process inside the block, available after it.

    While it scans all live objects, the output of the engine's process is not read: steps come late, then at once.
    """
    began, seconds, frozen = [0.0], list[float](), gc.get_freeze_count()

    def heard(phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            began[0] = time.perf_counter()
        else:
            seconds.append(time.perf_counter() - began[0])

    gc.callbacks.append(heard)
    try:
        yield lambda: {
            **{"count": len(seconds), "frozen": frozen},
            **_milliseconds(all=sum(seconds), max=max(seconds, default=0.0)),
        }
    finally:
        gc.callbacks.remove(heard)


def _name(process: psutil.Process) -> str:
    return "driver" if process.pid == os.getpid() else process.name()


def _thread_seconds(process: psutil.Process) -> dict[int, float]:
    return {thread.id: thread.user_time + thread.system_time for thread in process.threads()}


def _shares(threads: Sequence[float]) -> dict[str, Any]:
    busiest = sorted(threads, reverse=True)[:BUSIEST]
    return {"all": round(sum(threads), 3), "threads": [round(share, 3) for share in busiest]}


def _summary(ordered: Sequence[float]) -> dict[str, float]:
    return _milliseconds(median=median(ordered), p99=ordered[len(ordered) * 99 // 100], max=ordered[-1])


def _milliseconds(**seconds: float) -> dict[str, float]:
    return {name: round(1000 * value, 2) for name, value in seconds.items()}


def engine_row(described: Mapping[str, Any], settings: VllmConfig) -> dict[str, Any]:
    """Facts that decide an engine's speed: its report of itself (`summary`), and its settings."""
    flash = described["backend"]["implementation"] == "FlashAttentionImpl"
    told = {name: getattr(settings, name) for name in ("batch_invariant", "batched_tokens")}
    found = {name: described[name] for name in ("backend", "kernels", "runner")}
    kernel = "flash_attention" if flash else "fp8_decode"
    return {**told, "forward": described["model"], "decode_kernel": kernel, **found}


def repeated(run: Callable[[int], dict[str, Any]], repeats: int) -> Iterator[dict[str, Any]]:
    """Call `run` with seeds from 1 on; after every call the run of median speed so far, with what all of them took."""
    runs: list[dict[str, Any]] = []
    for seed in range(1, repeats + 1):
        runs.append(run(seed))
        speeds = [done["tokens_per_s"] for done in runs]
        middle = runs[speeds.index(median_low(speeds))]
        every = [{name: done[name] for name in _OF_A_RUN} for done in runs]
        yield {"repeats": len(runs), "all_tokens_per_s": speeds, **middle, "runs": every}
