"""The kernels of a training, compiled before it begins: `fp8-grpo compile`, and what `fp8-grpo run` does first.

Products by DeepGEMM are planned from shapes (`resources.kernels`). The packed trainer compiles its own
kernels, on the shortest and on the longest pack. Its model has the same widths, few layers and a small vocabulary.
An engine may keep the results of its start by itself, as vLLM does (`torch.compile`).
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import NamedTuple

import torch

from fp8core.config.loss import LossConfig
from fp8core.config.run import RunConfig
from fp8core.config.training import CorrectionConfig
from fp8core.errors import UserError
from fp8core.kernels.compilation import Job, KernelFolders, missing_jobs, multiply, release_memory, run_jobs
from fp8core.kernels.hopper_gemm import DEEP_GEMM_DISTRIBUTIONS, has_deep_gemm
from fp8core.models.architecture import Architecture, with_whole_tiles
from fp8core.models.decoder import rotary_tables
from fp8core.models.families import layer_parts, parameter_shapes
from fp8core.models.hub import model_shape
from fp8core.numerics import fused
from fp8core.numerics.e4m3 import FiniteFlag, row_codes
from fp8core.numerics.elementwise import KERNELS
from fp8core.numerics.grouped import choose_experts, expert_rows, forward_multiple, gathered_codes, mixed
from fp8core.numerics.kv_scales import LayerScales
from fp8core.numerics.packed import packed_length
from fp8core.numerics.recipe import Grouping
from fp8core.resources.kernels import Product, shared_out
from fp8core.rl.batch import RolloutBatch, TokenBatch
from fp8core.rollout.registry import engine_entry, longest_sequence
from fp8core.run.build import build_sft_trainer, build_trainer
from fp8core.store.manifest import current_code, installed_version
from fp8core.training.registry import trainer_of

HOPPER = "sm_90"
_COMPILERS = ("torch", "triton", *DEEP_GEMM_DISTRIBUTIONS)
# Triton compiles another kernel where an integer is 1, or a multiple of 16: numbers of rows, and their pitch in fours.
_ENGINE_ROWS = (1, 2, 14, 16)
_VOCABULARY = 512
_SEQUENCE = 128
_RATE = 1e-4


class CompilationResult(NamedTuple):
    """A compilation had `jobs`, compiled `done` of them now and the others before."""

    jobs: int
    done: int
    seconds: float

    def __str__(self) -> str:
        if not self.jobs:
            return "nothing is compiled for a GPU"
        if not self.done:
            return f"all kernels are there: {self.jobs} jobs were done before"
        return f"kernels compiled in {self.seconds:.1f} s: {self.done} of {self.jobs} jobs, the others were done before"


def compile_kernels(
    config: RunConfig, platform: str, folders: KernelFolders, progress: Callable[[int, int], None]
) -> CompilationResult:
    """Compile the kernels that are missing, on all processors.

    `progress` hears how many jobs of how many are done. Raises UserError: there is no GPU that they are for, or one of
    them cannot be compiled."""
    arch = model_shape(config)
    began = time.perf_counter()
    if not needs_kernels(config, arch):
        return CompilationResult(0, 0, 0.0)
    if platform == "cpu":
        raise UserError(f"{config.name} compiles for a GPU, and there is none: torch sees no GPU")
    if platform != HOPPER:
        raise UserError(f"{config.name} compiles for Hopper ({HOPPER}), and this GPU is {platform}")
    gpu = torch.cuda.get_device_properties(0)
    jobs = planned_jobs(config, arch, folders)
    versions = "\n".join(
        [gpu.name, str(torch.version.cuda), *(f"{name} {installed_version(name)}" for name in _COMPILERS)]
    )
    missing = missing_jobs(jobs, versions)
    if missing:
        run_jobs(missing, versions, progress)
    return CompilationResult(len(jobs), len(missing), time.perf_counter() - began)


def needs_kernels(config: RunConfig, arch: Architecture) -> bool:
    entry = engine_entry(config)
    trainer = trainer_of(config.training)
    return bool([*entry.products(config, arch), *trainer.products(config, arch)] or trainer.packs(config, arch))


def planned_jobs(config: RunConfig, arch: Architecture, folders: KernelFolders) -> list[Job]:
    """All jobs of a training: passes of the trainer come after the products that they compute."""
    entry = engine_entry(config)
    trainer = trainer_of(config.training)
    products = [*trainer.products(config, arch), *entry.products(config, arch)] if has_deep_gemm() else []
    product_jobs = [product_job(product, folders) for product in shared_out(products)]
    return [*_operation_jobs(config, arch, folders), *product_jobs, *_trainer_jobs(config, arch, folders)]


def product_job(product: Product, folders: KernelFolders) -> Job:
    rows = f"{product.rows[0]} to {product.rows[-1]} rows"
    name = f"products of {rows} with {product.outputs} x {product.contraction} in {product.operands}"
    return Job(name, str(product.rows), folders.deep_gemm, multiply, (product,))


def _operation_jobs(config: RunConfig, arch: Architecture, folders: KernelFolders) -> Iterator[Job]:
    entry = engine_entry(config)
    packs = trainer_of(config.training).packs(config, arch)
    if config.precision.training.linear == "fp8_block":
        arch = with_whole_tiles(arch)
    groups = config.precision.recipe.activations
    about = f"{arch} {groups} {current_code()}"
    if entry.gpus(config) and entry.arithmetic(config) == "kernels":
        for rows in _ENGINE_ROWS:
            name = f"the engine with {rows} tokens"
            arguments = (arch, rows, groups)
            yield Job(name, about, folders.triton, decode, arguments)
    if packs:
        name = f"gradients of packs of {packs[0]} to {packs[-1]} tokens"
        yield Job(name, about, folders.triton, sweep_gradients, (arch, packs))


def _trainer_jobs(config: RunConfig, arch: Architecture, folders: KernelFolders) -> Iterator[Job]:
    packs = trainer_of(config.training).packs(config, arch)
    if not packs:
        return
    read = {"precision", "training", "calibration", "rollout", "data"}
    about = f"{arch} {config.model_dump_json(include=read)} {current_code()}"
    ends = tuple(dict.fromkeys((packs[0], packs[-1])))
    for work in (score, learn) if config.warm_start is None else (score, learn, warm_up):
        name = f"the trainer ({work.__name__}, packs of {' and '.join(map(str, ends))} tokens)"
        yield Job(name, about, folders.triton, work, (config, arch, ends))


def decode(arch: Architecture, rows: int, groups: Grouping, device: str = "cuda") -> None:
    """Compute the operations of the aligned engine's layers on so many tokens, but for products and attention."""

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.bfloat16, device=device)

    flag = FiniteFlag(torch.device(device))
    layout = fused.HeadLayout(arch.num_heads, arch.num_kv_heads, arch.head_dim)
    x = zeros(rows, arch.hidden_size)
    norm = zeros(arch.hidden_size)
    head_norm = zeros(arch.head_dim)
    for residual in (None, x):
        fused.add_norm_row_codes(x, residual, norm, arch.rms_norm_eps, groups, flag)
    fused.add_norm(x, x, norm, arch.rms_norm_eps)
    cos, sin = (KERNELS.tables(table).to(device) for table in rotary_tables(arch))
    qkv = zeros(rows, _qkv_width(arch))
    positions = torch.zeros(rows, dtype=torch.int64, device=device)
    norms = (head_norm, head_norm) if layer_parts(arch).qk_norm else None
    fused.norm_rotate(qkv, norms, cos, sin, positions, layout, arch.rms_norm_eps)
    row_codes(zeros(rows, arch.num_heads * arch.head_dim), groups, flag)
    fused.swiglu_row_codes(zeros(rows, 2 * arch.intermediate_size), groups, flag)
    if arch.experts is not None:
        chosen, gates = choose_experts(
            torch.zeros(rows, arch.experts.count, device=device), arch.experts.per_token, arch.experts.normalise_top_k
        )
        by_expert = expert_rows(chosen, arch.experts.count, forward_multiple(chosen.numel(), arch.experts.count))
        gathered_codes(row_codes(x, groups, flag), by_expert)
        inner = zeros(len(by_expert.slots), 2 * arch.experts.intermediate_size)
        fused.swiglu_row_codes(inner, groups, flag, by_expert)
        mixed(zeros(len(by_expert.slots), arch.hidden_size), by_expert, gates)
    release_memory()


def sweep_gradients(arch: Architecture, packs: range, device: str = "cuda") -> None:
    """Compute the gradients whose kernels depend on how many tokens a pack has, for every such number."""
    layout = fused.HeadLayout(arch.num_heads, arch.num_kv_heads, arch.head_dim)
    every = torch.zeros(packs[-1], arch.hidden_size, dtype=torch.bfloat16, device=device)
    all_heads = torch.zeros(packs[-1], _qkv_width(arch), dtype=torch.bfloat16, device=device)
    weight, heads = (torch.ones(n, device=device) for n in (arch.hidden_size, arch.head_dim))
    cos, sin = (table.bfloat16().float().to(device) for table in rotary_tables(arch))
    norms = (heads, heads) if layer_parts(arch).qk_norm else None
    for tokens in packs:
        x = every[:tokens]
        qkv = all_heads[:tokens]
        inverse = torch.ones(tokens, device=device)
        for around in (None, x):
            fused.add_norm_backward(x, around, x, weight, inverse)
        positions = torch.zeros(tokens, dtype=torch.int64, device=device)
        fused.norm_rotate_backward(qkv, qkv, norms, cos, sin, positions, layout, arch.rms_norm_eps)
    release_memory()


def score(config: RunConfig, arch: Architecture, packs: Sequence[int]) -> None:
    short = _short(config, arch)
    with closing(build_trainer(_plain(config), short, _zeros(short))) as trainer:
        for tokens in packs:
            batch = _batch(config, arch, tokens)
            trainer.statistics(batch)
            trainer.logprobs(batch, config.rollout.temperature, _scales(config, short))
        trainer.export()
        trainer.digest()
    release_memory()


def learn(config: RunConfig, arch: Architecture, packs: Sequence[int]) -> None:
    short = _short(config, arch)
    with closing(build_trainer(_plain(config), short, _zeros(short))) as trainer:
        for tokens in packs:
            batch = _batch(config, arch, tokens)
            mask = torch.ones(len(batch), int(batch.response_mask.sum(-1).max()), dtype=torch.bool)
            logprobs = torch.zeros(mask.shape)
            every = torch.ones(len(batch))
            rollouts = RolloutBatch(batch, mask, logprobs, logprobs, None, every, every.bool())
            trainer.step(rollouts, config.rollout.temperature, _scales(config, short))
    release_memory()


def warm_up(config: RunConfig, arch: Architecture, packs: Sequence[int]) -> None:
    short = _short(config, arch)
    trainer = build_sft_trainer(_plain(config), short, _zeros(short))
    assert trainer is not None, "what has packs trains the warm start"
    with closing(trainer):
        for tokens in packs:
            trainer.sft_step(_batch(config, arch, tokens), _RATE)
    release_memory()


def _qkv_width(arch: Architecture) -> int:
    return (arch.num_heads + 2 * arch.num_kv_heads) * arch.head_dim


def _plain(config: RunConfig) -> RunConfig:
    training = config.training.model_copy(update={"minibatches": 1, "epochs": 1})
    plain = {"loss": LossConfig(), "correction": CorrectionConfig(method="none"), "training": training}
    return config.model_copy(update=plain)


def _short(config: RunConfig, arch: Architecture) -> Architecture:
    """As few layers as have all formats; the size of the vocabulary decides no kernel but those of products."""
    formats = config.precision.bf16_first_layers + config.precision.bf16_last_layers + 1
    vocabulary = min(arch.vocab_size, _VOCABULARY)
    return replace(arch, num_layers=min(arch.num_layers, formats), vocab_size=vocabulary)


def _zeros(arch: Architecture) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape) for name, shape in parameter_shapes(arch).items()}


def _scales(config: RunConfig, arch: Architecture) -> Sequence[LayerScales]:
    in_fp8 = config.precision.training.kv_cache == "fp8"
    return [LayerScales(1.0, 1.0, 1.0)] * arch.num_layers if in_fp8 else []


def _batch(config: RunConfig, arch: Architecture, tokens: int) -> TokenBatch:
    """Equal rows that fill one pack: a prompt of one token, the rest written."""
    length = min(_SEQUENCE, longest_sequence(config, arch))
    rows = max(1, tokens // packed_length(length))
    return TokenBatch.of([[0]] * rows, [[0] * (length - 1)] * rows, truncation=config.rollout.truncation)
