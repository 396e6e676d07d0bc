"""Error of FP8 cache and attention under scales of Q, K and V from each calibration source, and under an oracle's.

    python -m benchmarks.studies.calibration_error            # print
    python -m benchmarks.studies.calibration_error --write    # and write the page and the results file

Every model is held at two successive versions of its policy, with rollouts of each: scales for the later version are
made of what a run has before it generates with that version, and judged on what it generates. One seeded process on one
core, about five minutes, of which three train the `tiny` run.

The outlier channels leave the model's function as it was: gains are powers of two, undone in the queries (whose rotary
pairs share a gain) and in the output projection, so that only the cache sees them. What changes the log-probs is then
FP8 attention and nothing else."""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import RESULTS, Row, provenance, table, write_rows
from benchmarks.numerics_tables import write_pages
from fp8core.config.load import load_config
from fp8core.config.run import RunConfig
from fp8core.models.architecture import Architecture
from fp8core.models.checkpoint import initial_weights
from fp8core.models.decoder import Decoder, FullContext
from fp8core.models.weights import load_policy, stored_weights, training_formats
from fp8core.numerics.attention import AttentionFormat, Bf16Attention, Fp8Attention, Fp32Attention
from fp8core.numerics.gemm import relative_rms
from fp8core.numerics.kv_scales import KvStatistics, LayerScales, covered_amax, scales_from_statistics
from fp8core.rl.alignment_metrics import alignment_metrics
from fp8core.rl.batch import TokenBatch
from fp8core.run.build import build_base, build_trainer
from fp8core.run.scoring import token_batch
from fp8core.store.artifacts import ArtifactStore
from fp8core.store.layout import LEDGER, checkpoint_place
from fp8core.store.ledger import LedgerView
from fp8core.training.exact import ExactTrainer

POWERS = range(-4, 5)
EIGHTHS = range(-4, 5)


@dataclass(frozen=True)
class HeldHeads:
    """Q, K and V of one layer, and what its attention adds to the residual when nothing is rounded below FP32.

    Errors are taken after the output projection: channels count by what the model makes of them, not by their size.

    Attributes:
        q, k, v: [B, heads, T, d].
        valid: bool [B, T].
        output: weight of the output projection, [hidden, heads * d].
        exact: FP64 [valid tokens, hidden].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    valid: Tensor
    output: Tensor
    exact: Tensor

    @classmethod
    def of(cls, heads: tuple[Tensor, Tensor, Tensor], valid: Tensor, output: Tensor) -> "HeldHeads":
        """With the exact output computed."""
        unknown = cls(*heads, valid, output.double(), torch.empty(0))
        return replace(unknown, exact=unknown.attended(Fp32Attention(), None))

    def error(self, scales: LayerScales) -> float:
        """Relative RMS error that FP8 attention makes under these scales."""
        return relative_rms(self.attended(Fp8Attention(), scales), self.exact)

    def attended(self, form: AttentionFormat, scales: LayerScales | None) -> Tensor:
        """Projected output of attention in a format, FP64 [valid tokens, hidden]."""
        mask = FullContext.of(self.valid).mask
        out = form.attend(self.q, *form.store(self.k, self.v, scales), mask, scales)
        return out.transpose(1, 2)[self.valid].flatten(1).double() @ self.output.t()


@torch.no_grad()
def heads_of(
    config: RunConfig, arch: Architecture, masters: Mapping[str, Tensor], batch: TokenBatch
) -> list[HeldHeads]:
    """Every layer's heads in a pass with a BF16 cache and the linears of the configuration."""
    formats = training_formats(config.precision, arch.num_layers).with_attention(Bf16Attention())
    weights = load_policy(arch, stored_weights(masters, formats.stored_names(), formats.scale_rule))
    found: list[HeldHeads] = []

    def keep(layer: int, heads: tuple[Tensor, Tensor, Tensor]) -> None:
        output = masters[f"model.layers.{layer}.self_attn.o_proj.weight"]
        found.append(HeldHeads.of(heads, batch.valid, output))

    Decoder(arch, formats).hidden(weights, batch.tokens, batch.positions, FullContext.of(batch.valid), (), keep)
    return found


def oracle(heads: HeldHeads, starts: Iterable[LayerScales]) -> LayerScales:
    """Scales of the smallest error on these very heads, as no calibration can know them.

    The search begins at the best of `starts`, so that it is never worse. It changes one tensor at a time, over powers
    of two and then over eighths of a power, twice.
    """
    best, scales = min(((heads.error(start), start) for start in starts), key=lambda pair: pair[0])
    for steps, unit in ((POWERS, 1.0), (EIGHTHS, 0.125)):
        for name in "qkvqkv":
            middle = scales
            for step in steps:
                value = torch.tensor(getattr(middle, name) * 2.0 ** (step * unit), dtype=torch.float32).item()
                candidate = replace(middle, **{name: value})
                if (found := heads.error(candidate)) < best:
                    best, scales = found, candidate
    return scales


STEPS = 80
FEW = 4
BF16_LINEARS = [f"precision.{side}.linear=bf16" for side in ("rollout", "training")]
Masters = Mapping[str, Tensor]


@dataclass(frozen=True)
class Material:
    """Three versions of a policy, the first of a run and two successive ones, and rollouts of the latter two."""

    name: str
    config: RunConfig
    arch: Architecture
    first: Masters
    earlier: Masters
    later: Masters
    rollouts: TokenBatch
    next_rollouts: TokenBatch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="rewrite docs/results/calibration.md and the results file")
    write = parser.parse_args().write
    torch.set_num_threads(1)
    random = random_material()
    with tempfile.TemporaryDirectory() as folder:
        trained = trained_material(Path(folder), STEPS)
    cases = [random, with_outliers(random, 32, 32), with_outliers(random, 32, 4096)]
    cases += [trained, with_outliers(trained, 32, 4096)]
    rows = [row | provenance() for material in cases for row in measured(material)]
    parts = {"calibration": error_table(rows), "calibration_logprobs": logprob_table(rows)}
    for name, text in parts.items():
        print(f"\n{name}\n\n{text}")
    if write:
        write_rows(RESULTS / "calibration_error.json", rows)
        write_pages(parts)


# Models


def random_material() -> Material:
    """4 layers of width 256, 4 query and 2 KV heads of 64 channels; an update moves every weight by 2 %."""
    arch = Architecture(
        family="llama",
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        rms_norm_eps=1e-6,
        rope_theta=10_000.0,
        max_positions=256,
        rope_scaling=None,
        qk_norm=False,
        tie_embeddings=False,
    )
    sharp = ("q_proj.weight", "k_proj.weight")
    first = {n: w * 2 if n.endswith(sharp) else w for n, w in initial_weights(arch, seed=0).items()}
    earlier = _moved(first, seed=1)
    name = "random, 4 layers of 256"
    config = load_config("tiny", BF16_LINEARS)
    return Material(name, config, arch, first, earlier, _moved(earlier, seed=2), _random_rows(3), _random_rows(4))


def _moved(masters: Masters, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: w * (1 + 0.02 * torch.randn(w.shape, generator=generator)) for name, w in masters.items()}


def _random_rows(seed: int) -> TokenBatch:
    tokens = torch.randint(512, (8, 96), generator=torch.Generator().manual_seed(seed)).tolist()
    return TokenBatch.of([row[:24] for row in tokens], [row[24:] for row in tokens])


def trained_material(folder: Path, steps: int, settings: Sequence[str] = ()) -> Material:
    """The `tiny` run: its last two policies that have generated, and what they generated."""
    kept = ["run=tiny", f"runs={folder}", f"steps={steps}", "checkpoint.every=1", f"checkpoint.keep={steps}"]
    flags = [flag for setting in (*kept, *settings) for flag in ("--set", setting)]
    subprocess.run([Path(sys.executable).parent / "fp8-grpo", "run", "tiny", *flags], cwd=folder, check=True)
    config, run = load_config("tiny", [*kept, *settings]), folder / "tiny"
    base = build_base(config)

    def policy(version: int) -> dict[str, Tensor]:
        trainer = build_trainer(config, base.arch, base.tensors)
        trainer.load(run / checkpoint_place(version))
        return {name: tensor.detach() for name, tensor in trainer.masters.items()}

    store, ledger = ArtifactStore(run), LedgerView.read(run / LEDGER)
    rollouts, following = (
        token_batch(store.get_table(ledger.tasks(step)["rollout"].outputs["rollouts"])) for step in (steps - 1, steps)
    )
    versions = (policy(version) for version in (1, steps - 2, steps - 1))
    return Material(f"`tiny` after {steps} steps", config, base.arch, *versions, rollouts, following)


def with_outliers(material: Material, key_gain: int, value_gain: int) -> Material:
    """Four channels of every KV head amplified in the cache; linears in BF16, which no gain disturbs."""
    first, earlier, later = (
        amplified(material.arch, masters, key_gain, value_gain)
        for masters in (material.first, material.earlier, material.later)
    )
    name = f"{material.name}, 4 channels of K x {key_gain}, of V x {value_gain}"
    config = load_config("tiny", BF16_LINEARS)
    return replace(material, name=name, config=config, first=first, earlier=earlier, later=later)


def amplified(arch: Architecture, masters: Masters, key_gain: int, value_gain: int) -> dict[str, Tensor]:
    """Weights of the same function with larger K and V in two rotary pairs of channels of every KV head."""
    half = arch.head_dim // 2
    channels = [half // 8, half // 8 + half, half // 2, half // 2 + half]
    gains = torch.ones(2, arch.head_dim)
    gains[:, channels] = torch.tensor([[float(key_gain)], [float(value_gain)]])
    key, value = gains
    found = dict(masters)
    for i in range(arch.num_layers):
        layer = f"model.layers.{i}.self_attn"
        if arch.qk_norm:
            changes = {"k_norm": key, "q_norm": 1 / key}
        else:
            changes = {
                "k_proj": key.repeat(arch.num_kv_heads)[:, None],
                "q_proj": 1 / key.repeat(arch.num_heads)[:, None],
            }
        changes |= {"v_proj": value.repeat(arch.num_kv_heads)[:, None], "o_proj": 1 / value.repeat(arch.num_heads)}
        found |= {f"{layer}.{n}.weight": masters[f"{layer}.{n}.weight"] * gain for n, gain in changes.items()}
    return found


# Scales and their errors


def choices(material: Material, heads: Sequence[HeldHeads]) -> dict[str, list[LayerScales]]:
    """Scales for the later policy by where they come from; powers of two with a margin of 2, as by default."""
    config, arch = material.config, material.arch
    first, earlier, later = (build_trainer(config, arch, m) for m in (material.first, material.earlier, material.later))
    fresh = later.statistics(material.rollouts)
    in_force = _scales(earlier.statistics(material.rollouts))
    lagging = earlier.logprobs(material.rollouts, config.rollout.temperature, in_force).statistics
    found = {
        "scale 1.0": [LayerScales(1.0, 1.0, 1.0)] * arch.num_layers,
        "logprob_pass": _scales(lagging),
        "logprob_pass, 99.99 %": _scales(lagging, 99.99),
        "fresh_pass": _scales(fresh),
        "fresh_pass, 99.99 %": _scales(fresh, 99.99),
        f"fresh_pass, {FEW} rollouts": _scales(later.statistics(_spread(material.rollouts, FEW))),
        "prompts alone": _scales(later.statistics(_prompts(material.rollouts))),
        "first policy's prompts": _scales(first.statistics(_prompts(material.rollouts))),
    }
    candidates = zip(*found.values(), strict=True)
    return {**found, "oracle": [oracle(layer, starts) for layer, starts in zip(heads, candidates, strict=True)]}


def _scales(statistics: KvStatistics, percentile: float = 100.0) -> list[LayerScales]:
    return scales_from_statistics(covered_amax(statistics.histograms(), percentile), 2.0, "pow2")


def _spread(batch: TokenBatch, count: int) -> TokenBatch:
    rows = [i * len(batch) // count for i in range(count)]
    return TokenBatch(batch.tokens[rows], batch.valid[rows], batch.completion[rows])


def _prompts(batch: TokenBatch) -> TokenBatch:
    return replace(batch, valid=batch.valid & ~batch.completion)


def measured(material: Material) -> list[Row]:
    """A row for each choice of scales: errors on the next rollouts, against a BF16 cache and BF16 attention.

    Of what attention adds to the residual, layer by layer, and of the log-probs of the whole model.
    """
    arch, batch, temperature = material.arch, material.next_rollouts, material.config.rollout.temperature
    heads = heads_of(material.config, arch, material.later, batch)
    trainer = build_trainer(material.config, arch, material.later)
    sides = [f"precision.{side}.kv_cache=bf16" for side in ("rollout", "training")]
    plain = build_trainer(load_config("tiny", [*_linears(material.config), *sides]), arch, material.later)
    reference = plain.logprobs(batch, temperature, ()).logprobs
    rows = []
    for name, scales in choices(material, heads).items():
        errors = [layer.error(s) for layer, s in zip(heads, scales, strict=True)]
        rows.append(
            {
                "kind": "calibration_error",
                "model": material.name,
                "shape": _shape(arch),
                "tokens": int(batch.valid.sum()),
                "scales": name,
                "attention_error": errors,
                "attention_error_mean": sum(errors) / len(errors),
                "attention_error_worst": max(errors),
                "saturated_share": _saturated(heads, scales),
                **_logprob_errors(trainer, batch, temperature, scales, reference),
            }
        )
    return rows


def _linears(config: RunConfig) -> list[str]:
    sides = {"rollout": config.precision.rollout, "training": config.precision.training}
    return [f"precision.{name}.linear={side.linear}" for name, side in sides.items()]


def _shape(arch: Architecture) -> dict[str, int]:
    names = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim")
    return {name: getattr(arch, name) for name in names}


def _saturated(heads: Sequence[HeldHeads], scales: Sequence[LayerScales]) -> float:
    statistics = KvStatistics(len(heads))
    for i, (layer, of_layer) in enumerate(zip(heads, scales, strict=True)):
        statistics.observe(i, (layer.q, layer.k, layer.v), layer.valid, of_layer)
    return statistics.saturated_share()


def _logprob_errors(
    trainer: ExactTrainer, batch: TokenBatch, temperature: float, scales: Sequence[LayerScales], reference: Tensor
) -> dict[str, float]:
    found = trainer.logprobs(batch, temperature, scales).logprobs
    mask = ~reference.isnan()
    metrics = alignment_metrics(found.nan_to_num(), reference.nan_to_num(), mask)
    return {name: metrics[name] for name in ("logprob_abs_diff", "abs_diff_p99", "abs_diff_max", "k2_kl")}


# Tables


def error_table(rows: Sequence[Row]) -> str:
    """Error of what attention adds to the residual, mean over layers, and the saturated share from 0.01 % on."""

    def cell(row: Row) -> str:
        share = row["saturated_share"]
        return f"{row['attention_error_mean']:.2%}" + (f" ({share:.2%} saturated)" if share >= 1e-4 else "")

    return _by_model(rows, cell)


def logprob_table(rows: Sequence[Row]) -> str:
    """Mean and largest distance of log-probs, in nats."""
    return _by_model(rows, lambda row: f"{row['logprob_abs_diff']:.4f}, {row['abs_diff_max']:.3f}")


def _by_model(rows: Sequence[Row], cell: Any) -> str:
    models = list(dict.fromkeys(row["model"] for row in rows))
    names = list(dict.fromkeys(row["scales"] for row in rows))
    cells = {(row["scales"], row["model"]): cell(row) for row in rows}
    return table(["scales", *models], [[name, *(cells[name, model] for model in models)] for name in names])


if __name__ == "__main__":
    main()
