"""The example of docs/results/bisect.md: an engine in block FP8 with wrong weights of a linear, and the search for it.

    python -m benchmarks.studies.bisect_example

A small warm start makes a policy. The reference computes it in BF16, the suspect in FP8 with one damaged linear. The
scale of that linear's first weight tile is twice the right one, one exponent too high. Prints the tables of the page
and draws docs/images/bisect.png.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from benchmarks.harness import ROOT
from fp8core.alignment.bisect import Bisection, Side, Task, bisect, units_of
from fp8core.config.load import load_config
from fp8core.config.precision import PrecisionContract, SidePrecision
from fp8core.config.run import RunConfig
from fp8core.data.chain import ChainSource
from fp8core.data.demonstrations import TokenisedDemonstration
from fp8core.models.architecture import Architecture
from fp8core.models.tokenizer import Tokenizer
from fp8core.models.weights import SCALE_SUFFIX, rollout_formats
from fp8core.numerics.kv_scales import covered_amax, scales_from_statistics
from fp8core.report.drawing import draw_bisection
from fp8core.report.text import bisection_text
from fp8core.rl.batch import TokenBatch
from fp8core.run.build import build_base, build_trainer
from fp8core.run.sft import ReferenceSftTrainer, train_on_demonstrations

PICTURE = ROOT / "docs" / "images" / "bisect.png"
SETTINGS = ["architecture.num_layers=4", "warm_start.steps=60", "warm_start.batch_size=64"]
DAMAGED = "model.layers.1.mlp.down_proj.weight"
ROWS = 64


def main() -> None:
    config = load_config("tiny", SETTINGS)
    assert config.warm_start is not None
    torch.set_num_threads(config.threads)
    base, source = build_base(config), ChainSource(config.data.chain)

    def demonstrations(step: int, rows: int = config.warm_start.batch_size) -> list[TokenisedDemonstration]:
        return tokenised(source, step, rows, config, base.tokenizer)

    trainer = ReferenceSftTrainer(base.arch, base.tensors)
    train_on_demonstrations(trainer, config.warm_start, demonstrations, lambda step, loss: None)
    masters = trainer.masters
    rows = demonstrations(config.warm_start.steps, ROWS)
    sequences = TokenBatch.of([row.prompt for row in rows], [row.completion for row in rows])
    task = calibrated(config, base.arch, masters, sequences)

    layers = base.arch.num_layers
    bf16 = PrecisionContract(rollout=SidePrecision(linear="bf16", kv_cache="bf16"))
    reference = Side.of(rollout_formats(bf16, layers), masters)
    sound = Side.of(rollout_formats(config.precision, layers), masters)
    suspect = Side(sound.formats, damaged(sound.stored))
    report("sound, by layer", bisect(base.arch, reference, sound, task, units_of(base.arch, "layer")))
    report("damaged, by layer", bisect(base.arch, reference, suspect, task, units_of(base.arch, "layer")))
    both = bisect(base.arch, reference, suspect, task, units_of(base.arch, "both"))
    report("damaged, by layer and operation", both)
    draw_bisection(both, PICTURE, "Block FP8 with one damaged weight tile, against BF16")


def tokenised(
    source: ChainSource, step: int, rows: int, config: RunConfig, tokenizer: Tokenizer
) -> list[TokenisedDemonstration]:
    """Demonstrations of one step as tokens."""
    assert config.warm_start is not None
    found = source.demonstrations(step, rows, config.seed, config.warm_start.step_by_step_share)
    encode = tokenizer.encode
    return [TokenisedDemonstration(encode(row.question), encode(row.completion)) for row in found]


def calibrated(config: RunConfig, arch: Architecture, masters: Mapping[str, Tensor], sequences: TokenBatch) -> Task:
    """These sequences, with scales of Q, K and V calibrated on them."""
    histograms = build_trainer(config, arch, masters).statistics(sequences).histograms()
    amax = covered_amax(histograms, config.calibration.covered_percentile)
    scales = scales_from_statistics(amax, config.calibration.margin, config.precision.scale_rule)
    return Task(sequences, config.rollout.temperature, scales)


def damaged(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights with the scale of the first tile of one linear doubled."""
    scales = stored[DAMAGED + SCALE_SUFFIX].clone()
    scales[0, 0] *= 2
    return {**stored, DAMAGED + SCALE_SUFFIX: scales}


def report(title: str, bisection: Bisection) -> None:
    """Print one table."""
    print(f"{title} ({bisection.tokens} tokens)\n\n{bisection_text(bisection)}\n")


if __name__ == "__main__":
    main()
