"""How many greedy tokens exact references share that differ in last bits alone, and in their format, on a CPU.

    python -m benchmarks.greedy_agreement --out FOLDER

A random mixture of experts of three layers of 256, in FP8, as tests/vllm gives it to vLLM on a GPU. A reference that
rounds where the kernels of vLLM do continues 32 prompts by eight tokens; after each prefix of that, others choose a
token: one that rounds as compiled code does, one in BF16, and three of the first kind whose linears and attention are
as far from the exact sums as those of vLLM were on an H200. FOLDER/greedy_agreement.json has a row for each
pair, and two for what those last bits are in a linear and in experts.
"""

import argparse
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import vllm_hopper_cases as cases
from fp8core.models.architecture import Architecture, Experts
from fp8core.models.decoder import TOP_K
from fp8core.models.experts import feed_forward
from fp8core.models.formats import Formats, LayerFormats, rollout_formats
from fp8core.models.weights import load_policy, stored_weights
from fp8core.numerics.attention import Fp8Attention
from fp8core.numerics.e4m3 import quantise_rows
from fp8core.numerics.gemm import scaled_gemm
from fp8core.numerics.kv_scales import LayerScales
from fp8core.numerics.linear import LinearWeight, dequantise_rows
from fp8core.numerics.rounding import FUSED, KERNELS, RoundingPoints
from fp8core.rollout.embedded import EmbeddedEngine
from fp8core.rollout.engine import PolicyScales, PromptGroup, Sampling
from fp8core.store.versions import git_state, library_versions

ROOT = Path(__file__).parents[1]
ARCH = Architecture(
    family="qwen3_moe",
    vocab_size=200,
    hidden_size=256,
    intermediate_size=384,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=128,
    rms_norm_eps=1e-6,
    rope_theta=10_000.0,
    max_positions=256,
    rope_scaling=None,
    qk_norm=True,
    tie_embeddings=False,
    experts=Experts(
        count=8, per_token=2, intermediate_size=128, normalise_top_k=True, sparse_step=1, dense_layers=(1,)
    ),
)
SCALES = PolicyScales(0, tuple(LayerScales(2.0**-i, 1.0, 0.5) for i in range(ARCH.num_layers)))


@dataclass(frozen=True)
class NearLinear:
    """Block FP8 whose sums are off before they are rounded, by normal noise of a share of the output's size."""

    share: float
    generator: torch.Generator
    name = "fp8_block"

    def __call__(self, x: Tensor, weight: LinearWeight) -> Tensor:
        exact = scaled_gemm(dequantise_rows(*quantise_rows(x, "pow2"), "pow2"), weight.dequantised)
        noise = torch.randn(exact.shape, generator=self.generator) * (self.share * exact.square().mean().sqrt())
        return (exact + noise).to(torch.bfloat16).float()


@dataclass(frozen=True)
class NearAttention:
    """FP8 attention with a share of its elements one unit in the last place too large or too small."""

    share: float
    generator: torch.Generator
    inner: Fp8Attention = field(default_factory=Fp8Attention)
    name = "fp8"

    def store(self, k: Tensor, v: Tensor, scales: LayerScales | None) -> tuple[Tensor, Tensor]:
        return self.inner.store(k, v, scales)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scales: LayerScales | None) -> Tensor:
        exact = self.inner.attend(q, k, v, mask, scales)
        moved, up = (torch.rand(exact.shape, generator=self.generator) < share for share in (self.share, 0.5))
        bits = exact.bfloat16().view(torch.int16) + torch.where(up, 1, -1).short()
        return torch.where(moved & (exact != 0), bits.view(torch.bfloat16).float(), exact)


# So that last bits are as in vllm_bisect_experts_hopper.json on equal inputs, where 5 to 9 % of a linear's elements
# differ by 0.07 to 0.09 % of its output's size, and 10 % of attention's by 0.25 %, which is more than single units.
LINEAR_NOISE, ATTENTION_SHARE = 1.5e-4, 0.10


def near(formats: Formats, seed: int) -> Formats:
    """The same with other last bits in every linear and in attention."""
    generator = torch.Generator().manual_seed(seed)
    linear, attention = NearLinear(LINEAR_NOISE, generator), NearAttention(ATTENTION_SHARE, generator)
    layer = LayerFormats(qkv=linear, output=linear, gate_up=linear, down=linear, attention=attention)
    return replace(formats, layers=(layer,) * len(formats.layers))


def formats_of(precision: str, points: RoundingPoints) -> Formats:
    """Those of vLLM's side."""
    return rollout_formats(cases.contract(precision), ARCH.num_layers).with_points(points)


def random_weights(formats: Formats) -> dict[str, Tensor]:
    """Stored weights of twice the ordinary spread."""
    masters = cases.random_masters(ARCH, spread=2)
    return stored_weights(masters, formats.stored_names(), formats.scale_rule)


def reference(formats: Formats) -> EmbeddedEngine:
    """An engine that holds them."""
    engine = EmbeddedEngine(ARCH, formats, max_batch=64)
    engine.update(random_weights(formats), SCALES, 0)
    return engine


def last_bits(formats: Formats, moved: Formats, tokens: int = 512) -> list[dict[str, object]]:
    """What `moved` makes of a linear's output and of that of experts: the share of elements that differ, and by how
    much of its size."""
    layer = load_policy(ARCH, random_weights(formats)).layers[0]
    x = torch.randn(tokens, ARCH.hidden_size, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    parts = {
        "qkv_proj": [each.layers[0].qkv(x, layer.qkv) for each in (formats, moved)],
        "experts": [feed_forward(x, layer.mlp, each.mlp(0), 0, TOP_K) for each in (formats, moved)],
    }
    return [
        {
            "kind": "last_bits",
            "part": part,
            "differing": float((other != exact).double().mean()),
            "rms": float((other - exact).norm() / exact.norm()),
        }
        for part, (exact, other) in parts.items()
    ]


def greedy(engine: EmbeddedEngine, prompts: Sequence[tuple[int, ...]], tokens: int) -> list[list[int]]:
    """A completion of each prompt."""
    groups = [PromptGroup(i, str(i), prompt, (0,), (0,)) for i, prompt in enumerate(prompts)]
    return [done.tokens for done in cases.collect(engine, groups, Sampling(0.0, tokens, frozenset()))]


def main() -> None:
    """Print a row for each pair of references."""
    parser = argparse.ArgumentParser(description="Compare the greedy tokens of exact references.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the result")
    out: Path = parser.parse_args().out
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 41, (32,), generator=generator).tolist()
    prompts = [tuple(torch.randint(4, 200, (length,), generator=generator).tolist()) for length in lengths]
    kernels = formats_of("fp8_linear_kv", KERNELS)
    completed = greedy(reference(kernels), prompts, tokens=8)
    prefixes = [(*p, *done[:n]) for p, done in zip(prompts, completed, strict=True) for n in range(len(done))]
    chosen = {
        "FP8, kernels": [[token] for done in completed for token in done],
        "FP8, fused": greedy(reference(formats_of("fp8_linear_kv", FUSED)), prefixes, tokens=1),
        "BF16, fused": greedy(reference(formats_of("bf16", FUSED)), prefixes, tokens=1),
    }
    for seed in range(3):
        chosen[f"FP8, kernels, near {seed}"] = greedy(reference(near(kernels, seed)), prefixes, tokens=1)
    about = {"commit": git_state(ROOT).get("commit"), "versions": library_versions()}
    about |= {"command": "python -m benchmarks.greedy_agreement --out FOLDER"}
    rows = [
        {"kind": "greedy_agreement", "sides": [a, b], "tokens": len(prefixes), "equal": _share(chosen[a], chosen[b])}
        for a, b in itertools.combinations(chosen, 2)
    ]
    rows += last_bits(kernels, near(kernels, 0))
    out.mkdir(parents=True, exist_ok=True)
    (out / "greedy_agreement.json").write_text(json.dumps([row | about for row in rows], indent=1) + "\n")
    for row in rows:
        print(row)


def _share(tokens: Sequence[list[int]], others: Sequence[list[int]]) -> float:
    return sum(a == b for a, b in zip(tokens, others, strict=True)) / len(tokens)


if __name__ == "__main__":
    main()
