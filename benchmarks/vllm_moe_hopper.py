"""Measure Qwen3-30B-A3B's shape in vLLM on one Hopper GPU: decoding in BF16 and FP8, and an update of its experts.

    python -m benchmarks.vllm_moe_hopper --out FOLDER [NAME ...] [--requests 256 --prompt 512 --generated 512]

Every measurement is a process of its own and writes FOLDER/NAME.json after every row, with the error that ended it, if
one did. Weights are random and drawn on the GPU; no part of the model is ever in main memory. The prompts are random as
well, so tokens go to all experts about evenly.

An update of all 37,491 tensors took 2.46 s, 0.81 s of it to read them back, each lent by itself and looked for anew.
Predicted in one buffer, as trainers ship them, with their places found once: 0.9 s, 0.35 s of it to read them back. The
first three updates took 2.72, 1.44 and 0.92 s. Reading back alone took 0.42 s after the first and 0.81 s after the
others, in which Python's collector may have gone through all objects of this process. Predicted without these, which a
training leaves out: 0.6 s, 0.42 s of it to read them back. It took 3.15, 1.11 and 1.04 s, and 0.42 s to read them back.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import vllm_hopper_cases as cases
from benchmarks.harness import ROOT, Row, RowFile
from fp8core.config.engines import VllmConfig
from fp8core.config.precision import PrecisionContract
from fp8core.models.architecture import Architecture, Experts, parameter_shapes
from fp8core.models.weights import SCALE_SUFFIX, in_one_buffer
from fp8core.numerics.kv_scales import LayerScales
from fp8core.numerics.recipe import TILE
from fp8core.processes.variables import set_variables
from fp8core.rollout.engine import PolicyScales, PromptGroup, Sampling
from fp8core.rollout.vllm.requirements import model_refusals
from fp8core.rollout.vllm.settings import required_environment, suggested_environment
from fp8core.run.context import gc_freeze, gc_unfreeze

MODEL = "qwen3-30b-a3b"
_AS_IT_IS: Mapping[str, str] = {}
# Codes of spread 100 with these scales are weights of spread 0.012.
_CODE_SPREAD, _SCALE, _SPREAD = 100.0, 2.0**-13, 0.012


def qwen3_30b_a3b(layers: int = 48) -> Architecture:
    """Qwen3-30B-A3B with fewer layers, or all 48."""
    experts = Experts(
        count=128, per_token=8, intermediate_size=768, normalise_top_k=True, sparse_step=1, dense_layers=()
    )
    return Architecture(
        family="qwen3_moe",
        vocab_size=151_936,
        hidden_size=2048,
        intermediate_size=6144,
        num_layers=layers,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope_theta=1_000_000.0,
        max_positions=40_960,
        rope_scaling=None,
        qk_norm=True,
        tie_embeddings=False,
        experts=experts,
    )


def random_policy(arch: Architecture, agreed: PrecisionContract, own_layers: int, device: str = "cuda") -> cases.Policy:
    """Random tensors of the right types; experts are parts of one tensor a layer, as grouped GEMMs need them.

    Layers from `own_layers` on share the tensors of those before, where memory is short.
    """
    draw = _Draw(device, fp8=agreed.rollout.linear == "fp8_block")
    torch.manual_seed(0)
    shapes = parameter_shapes(arch)
    tensors = {name: draw.plain(shape) for name, shape in shapes.items() if ".layers." not in name}
    own = [_random_layer(arch, draw) for _ in range(own_layers)]
    for layer in range(arch.num_layers):
        tensors |= {f"model.layers.{layer}.{name}": tensor for name, tensor in own[layer % own_layers].items()}
    assert {name for name in tensors if not name.endswith(SCALE_SUFFIX)} == set(shapes)
    layers = tuple(LayerScales(0.25, 0.25, 0.25) for _ in range(arch.num_layers))
    return cases.Policy(arch, tensors, PolicyScales(0, layers))


@dataclass(frozen=True)
class _Draw:
    """Where random tensors are made, and whether linears are codes."""

    device: str
    fp8: bool

    def plain(self, shape: tuple[int, ...]) -> Tensor:
        """BF16: ones, or of the spread that weights have."""
        if len(shape) == 1:
            return torch.ones(shape, device=self.device, dtype=torch.bfloat16)
        return torch.randn(shape, device=self.device, dtype=torch.bfloat16).mul_(_SPREAD)

    def linear(self, shape: tuple[int, ...]) -> dict[str, Tensor]:
        """A linear, or several [..., rows, columns], by the ends of their names: codes and their tiles' scales."""
        if not self.fp8:
            return {"": self.plain(shape)}
        drawn = torch.randn(shape, device=self.device, dtype=torch.bfloat16).mul_(_CODE_SPREAD).clamp_(-448, 448)
        tiles = (*shape[:-2], shape[-2] // TILE, shape[-1] // TILE)
        return {"": drawn.to(torch.float8_e4m3fn), SCALE_SUFFIX: torch.full(tiles, _SCALE, device=self.device)}


def _random_layer(arch: Architecture, draw: _Draw) -> dict[str, Tensor]:
    """Tensors of a layer by their names in it."""
    assert arch.experts is not None
    prefix = "model.layers.0."
    shapes = {name.removeprefix(prefix): s for name, s in parameter_shapes(arch).items() if name.startswith(prefix)}
    tensors: dict[str, Tensor] = {}
    for name in (name for name in shapes if ".experts." not in name):
        parts = draw.linear(shapes[name]) if name.endswith("_proj.weight") else {"": draw.plain(shapes[name])}
        tensors |= {name + end: part for end, part in parts.items()}
    count, width, hidden = arch.experts.count, arch.experts.intermediate_size, arch.hidden_size
    gate_up, down = draw.linear((count, 2, width, hidden)), draw.linear((count, 1, hidden, width))
    for expert in range(count):
        for part, stack, index in (("gate", gate_up, 0), ("up", gate_up, 1), ("down", down, 0)):
            name = f"mlp.experts.{expert}.{part}_proj.weight"
            tensors |= {name + end: stacked[expert, index] for end, stacked in stack.items()}
    return tensors


def start(
    arch: Architecture,
    agreed: PrecisionContract,
    settings: VllmConfig,
    max_batch: int,
    rows: RowFile,
    routes: bool,
    variables: Mapping[str, str],
) -> Any:
    """An engine, and a row with the seconds until it was ready; its environment and `variables` are set first."""
    build = cases.build()
    assert not (refusals := [*model_refusals(arch, agreed, settings)]), refusals
    suggested = suggested_environment(1, build)
    set_variables({**required_environment(agreed, settings, build), **variables}, suggested)
    from fp8core.rollout.vllm.engine import VllmEngine

    began = time.perf_counter()
    engine = VllmEngine(arch, agreed, settings, max_batch, build, routes=routes)
    seconds = round(time.perf_counter() - began, 1)
    rows.append({"kind": "start", "model": MODEL, "layers": arch.num_layers, "seconds": seconds})
    return engine


def rollout(
    options: argparse.Namespace,
    rows: RowFile,
    precision: str,
    settings: Mapping[str, Any],
    routes: bool = False,
    variables: Mapping[str, str] = _AS_IT_IS,
) -> None:
    """Decode `options.requests` prompts together; the row is the median of `options.repeats` runs."""
    arch, agreed = qwen3_30b_a3b(options.layers), cases.contract(precision)
    chosen = cases.options(gpu_memory_utilization=0.9, max_model_len=12_288, **settings)
    engine = start(arch, agreed, chosen, options.requests, rows, routes, variables)
    about = {"model": MODEL, "precision": precision, "layers": options.layers}
    try:
        updated = cases.synchronise(engine, random_policy(arch, agreed, own_layers=1))
        torch.cuda.empty_cache()
        gc_freeze()  # as a training does
        described = cases.summary(engine.describe())
        rows.append({"kind": "described", **about, **described})
        about |= cases.engine_row(described, chosen)
        rows.append({"kind": "update", **about, "shared_layers": True, **updated})
        about |= {"kind": "rollout", "long_tailed": False, "routes": routes}
        about |= {"experts": chosen.experts, "variables": dict(variables)}
        sizes = options.requests, options.prompt, options.generated
        # As long as what is timed: kernels are compiled for the rows of an expert, whose number decides which.
        cases.timed_rollout(engine, *sizes, seed=0)
        timed = cases.repeated(lambda seed: cases.timed_rollout(engine, *sizes, seed), options.repeats)
        rows.append_growing({**about, **row} for row in timed)
        if routes:
            rows.append({**about, "routes_reported": True, "repeats": 1, **_timed_routes(engine, *sizes)})
    finally:
        gc_unfreeze()
        engine.close()


def _timed_routes(engine: Any, requests: int, prompt: int, generated: int) -> Row:
    """The same rollout with the experts of every position returned."""
    generator = torch.Generator().manual_seed(5000)
    prompts = torch.randint(4, 2048, (requests, prompt), generator=generator).tolist()
    groups = [PromptGroup(i, f"{i}", tuple(tokens), (0,), (i,)) for i, tokens in enumerate(prompts)]
    began = time.perf_counter()
    sampling = Sampling(1.0, generated, frozenset(), report_experts=True)
    found = [done for finished in engine.generate(groups, sampling) for done in finished]
    seconds = time.perf_counter() - began
    positions = sum(len(done.experts) for done in found if done.experts is not None)
    assert positions == requests * (prompt + generated - 1)
    tokens = requests * generated
    sizes = {"requests": requests, "prompt": prompt, "generated": generated, "tokens": tokens, "positions": positions}
    return {**sizes, "seconds": round(seconds, 3), "tokens_per_s": round(tokens / seconds, 1)}


def moe_bf16(options: argparse.Namespace, rows: RowFile) -> None:
    """Everything in BF16."""
    rollout(options, rows, "bf16", {})


def moe_fp8_linear_kv(options: argparse.Namespace, rows: RowFile) -> None:
    """Linears, experts, cache and attention in FP8; experts by DeepGEMM."""
    rollout(options, rows, "fp8_linear_kv", {})


def moe_fp8_linear_kv_triton(options: argparse.Namespace, rows: RowFile) -> None:
    """The same, experts by Triton."""
    rollout(options, rows, "fp8_linear_kv", {"experts": "triton"})


def moe_fp8_linear_kv_v2(options: argparse.Namespace, rows: RowFile) -> None:
    """The first by vLLM's second model runner, which it takes for dense models: one kernel draws for all seeds."""
    rollout(options, rows, "fp8_linear_kv", {}, variables={"VLLM_USE_V2_MODEL_RUNNER": "1"})


def moe_routes(options: argparse.Namespace, rows: RowFile) -> None:
    """The first, started to report experts, without and with them."""
    rollout(options, rows, "fp8_linear_kv", {}, routes=True)


def moe_sync(options: argparse.Namespace, rows: RowFile) -> None:
    """All experts from one process's GPU memory into vLLM's, and read back."""
    arch, agreed = qwen3_30b_a3b(options.layers), cases.contract("fp8_linear_kv")
    settings = cases.options(gpu_memory_utilization=0.5, kv_cache_gib=4.0, graphs=False)
    engine = start(arch, agreed, settings, 16, rows, routes=False, variables=_AS_IT_IS)
    try:
        drawn = random_policy(arch, agreed, own_layers=arch.num_layers)
        policy = replace(drawn, tensors=in_one_buffer(drawn.tensors))
        del drawn
        torch.cuda.empty_cache()
        gc_freeze()  # as a training does
        about = {"kind": "sync", "model": MODEL, "precision": "fp8_linear_kv", "layers": options.layers}
        about |= {"shared_layers": False, "one_buffer": True}
        for _ in range(options.repeats + 2):
            rows.append(about | cases.synchronise(engine, policy))
    finally:
        gc_unfreeze()
        engine.close()


MEASUREMENTS: dict[str, Callable[[argparse.Namespace, RowFile], None]] = {
    f.__name__: f
    for f in (moe_fp8_linear_kv, moe_bf16, moe_fp8_linear_kv_triton, moe_fp8_linear_kv_v2, moe_sync, moe_routes)
}


def main() -> None:
    """Measure what is named, or everything, each in a process of its own."""
    options = _options()
    options.out = options.out.absolute()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.inside:
        _measure(options)
        return
    kept = ("out", "requests", "prompt", "generated", "repeats", "layers")
    flags = [f"--{key}={getattr(options, key)}" for key in kept]
    for name in options.names or MEASUREMENTS:
        command = [sys.executable, "-m", "benchmarks.vllm_moe_hopper", name, "--inside", *flags]
        result = options.out / f"{name}.json"
        result.unlink(missing_ok=True)
        with (options.out / f"{name}.log").open("wb") as log:
            code = subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
        print(result.read_text() if result.exists() else f"{name}: no result, see its log", flush=True)
        if code != 0:
            print(f"{name}: ended with {code}, see its log", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure Qwen3-30B-A3B's shape in vLLM on one Hopper GPU.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MEASUREMENTS))
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--generated", type=int, default=512, help="tokens of each completion")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--layers", type=int, default=48, help="of Qwen3-30B-A3B's 48")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _measure(options: argparse.Namespace) -> None:
    """One measurement in this process; an error is its result."""
    (name,) = options.names
    rows = RowFile(options.out / f"{name}.json", measurement=name)
    try:
        MEASUREMENTS[name](options, rows)
    except Exception as error:  # noqa: BLE001 - the rows so far must not be lost
        rows.fail(error)


if __name__ == "__main__":
    main()
