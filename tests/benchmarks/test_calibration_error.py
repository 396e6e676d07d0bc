import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.studies import calibration_error
from fp8core.config.load import load_config
from fp8core.run.build import build_trainer

SMALL = [
    *("warm_start.steps=3", "warm_start.batch_size=16", "rollout.prompts_per_step=4", "rollout.group_size=4"),
    *("evaluation.prompts=8", "evaluation.every=2"),
    # A policy that knows nothing earns nothing: weights move by their decay alone.
    "training.weight_decay=0.1",
]


@pytest.fixture(scope="module")
def material() -> Any:
    """The random model on few tokens."""
    whole = calibration_error.random_material()
    parts = {name: getattr(whole, name).part(slice(0, 4), 32) for name in ("rollouts", "next_rollouts")}
    return replace(whole, **parts)


@pytest.fixture(scope="module")
def saturating(material) -> list[dict[str, Any]]:
    return calibration_error.measured(calibration_error.with_outliers(material, 32, 4096))


def by_scales(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["scales"]: row for row in rows}


def test_the_oracle_is_nowhere_worse_on_its_own_tokens(saturating):
    found = by_scales(saturating)
    best = found.pop("oracle")["attention_error"]
    for name, row in found.items():
        assert all(ours <= theirs for ours, theirs in zip(best, row["attention_error"], strict=True)), name
    assert min(row["attention_error_mean"] for row in found.values()) > sum(best) / len(best)


def test_scale_one_saturates_where_values_exceed_448_and_calibrated_scales_do_not(saturating):
    found = by_scales(saturating)
    assert found["scale 1.0"]["saturated_share"] > 0.005
    for name in ("logprob_pass", "fresh_pass"):
        assert found[name]["saturated_share"] == 0.0
        assert 2 * found[name]["attention_error_mean"] < found["scale 1.0"]["attention_error_mean"]
        assert found[name]["logprob_abs_diff"] < found["scale 1.0"]["logprob_abs_diff"]


@pytest.mark.parametrize("qk_norm", [False, True])
def test_outlier_channels_change_nothing_without_fp8(material, qk_norm):
    settings = [f"precision.{side}.{part}=bf16" for side in ("rollout", "training") for part in ("linear", "kv_cache")]
    config, arch = load_config("tiny", settings), replace(material.arch, qk_norm=qk_norm)
    masters = dict(material.later)
    if qk_norm:
        names = [f"model.layers.{i}.self_attn.{n}_norm.weight" for i in range(arch.num_layers) for n in "qk"]
        masters |= {name: torch.ones(arch.head_dim) for name in names}
    amplified = calibration_error.amplified(arch, masters, 32, 4096)
    plain, loud = (build_trainer(config, arch, weights) for weights in (masters, amplified))
    batch = material.next_rollouts
    assert torch.equal(
        plain.logprobs(batch, 1.0, ()).logprobs.nan_to_num(), loud.logprobs(batch, 1.0, ()).logprobs.nan_to_num()
    )
    largest = [
        (a.k / b.k, a.v / b.v) for a, b in zip(*(t.statistics(batch).amax() for t in (loud, plain)), strict=True)
    ]
    assert all(k > 4 and v > 1000 for k, v in largest)


@pytest.mark.slow
def test_a_run_gives_two_policies_and_what_they_wrote(tmp_path, train_here, monkeypatch):
    def trained(command, *, cwd, check):
        program, *words = command
        assert (program, words[:2]) == (Path(sys.executable).with_name("fp8-grpo"), ["run", "tiny"])
        assert (cwd, check) == (tmp_path, True)
        train_here(words)

    monkeypatch.setattr(calibration_error, "subprocess", SimpleNamespace(run=trained))
    found = calibration_error.trained_material(tmp_path, 4, SMALL)
    assert len(found.rollouts) == len(found.next_rollouts) == 16
    assert not torch.equal(found.rollouts.tokens, found.next_rollouts.tokens)
    name = "model.layers.0.self_attn.k_proj.weight"
    first, earlier, later = (masters[name].norm() for masters in (found.first, found.earlier, found.later))
    assert first > earlier > later
