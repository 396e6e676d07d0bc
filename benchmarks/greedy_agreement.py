"""How many greedy tokens exact references share that differ in last bits alone, and in their format, on a CPU.

    python -m benchmarks.greedy_agreement --out FOLDER

A random mixture of experts of three layers of 256, in FP8, as tests/vllm gives it to vLLM on a GPU. A reference that
rounds where the kernels of vLLM do continues 32 prompts by eight tokens; after each prefix of that, one that rounds as
compiled code does and one in BF16 choose a token. FOLDER/greedy_agreement.json has a row for each pair.
"""

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import vllm_hopper_cases as cases
from fp8core.models.architecture import Architecture, Experts
from fp8core.models.formats import rollout_formats
from fp8core.models.weights import stored_weights
from fp8core.numerics.kv_scales import LayerScales
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


def reference(precision: str, points: RoundingPoints) -> EmbeddedEngine:
    """One that holds random weights of twice the ordinary spread."""
    formats = rollout_formats(cases.contract(precision), ARCH.num_layers).with_points(points)
    weights = stored_weights(cases.random_masters(ARCH, spread=2), formats.stored_names(), formats.scale_rule)
    engine = EmbeddedEngine(ARCH, formats, max_batch=64)
    engine.update(weights, SCALES, 0)
    return engine


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
    completed = greedy(reference("fp8_linear_kv", KERNELS), prompts, tokens=8)
    prefixes = [(*p, *done[:n]) for p, done in zip(prompts, completed, strict=True) for n in range(len(done))]
    chosen = {
        "FP8, kernels": [[token] for done in completed for token in done],
        "FP8, fused": greedy(reference("fp8_linear_kv", FUSED), prefixes, tokens=1),
        "BF16, fused": greedy(reference("bf16", FUSED), prefixes, tokens=1),
    }
    about = {"commit": git_state(ROOT).get("commit"), "versions": library_versions()}
    about |= {"command": "python -m benchmarks.greedy_agreement --out FOLDER"}
    rows = [
        {"kind": "greedy_agreement", "sides": [a, b], "tokens": len(prefixes), "equal": _share(chosen[a], chosen[b])}
        for a, b in itertools.combinations(chosen, 2)
    ]
    out.mkdir(parents=True, exist_ok=True)
    (out / "greedy_agreement.json").write_text(json.dumps([row | about for row in rows], indent=1) + "\n")
    for row in rows:
        print(row)


def _share(tokens: Sequence[list[int]], others: Sequence[list[int]]) -> float:
    return sum(a == b for a, b in zip(tokens, others, strict=True)) / len(tokens)


if __name__ == "__main__":
    main()
