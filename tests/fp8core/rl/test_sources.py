"""Every preset against its source: each formula is written here in plain Python from the file named, one row at a time.

A source says how much each token weighs in the loss (0 for what it rejects) and how many tokens it divides by.
"""

import math
import random
from statistics import fmean

import pytest
import torch

from fp8core.config.loss import LossConfig
from fp8core.config.training import CorrectionConfig
from fp8core.rl.batch import RolloutBatch, TokenBatch
from fp8core.rl.correction import PRESETS
from fp8core.rl.losses import Denominator
from fp8core.rl.objective import Objective, merge_totals

LOW, HIGH = 0.2, 0.28


def bounded(x, limit=20.0):
    return max(-limit, min(limit, x))


def tokens_of(rows):
    return sum(len(row) for row in rows)


def verl(level=None, cap=2.0, band=None, geometric=None, k3=None, bypass=False):
    """verl/trainer/ppo/rollout_corr_helper.py: k1 = -clamp(d), whose sum or mean must lie between the logs of the band.

    Decoupled, `response_mask` is replaced before tokens are counted; in bypass mode (core_algos.py,
    compute_policy_loss_bypass_mode) after `batch_num_tokens` was (workers/engine/fsdp/transformer_impl.py).
    """

    def keeps(row):
        k1 = [-bounded(d) for d in row]
        k3_mean = fmean(math.exp(-k) - 1 + k for k in k1)
        return (geometric is None or math.log(geometric[0]) <= fmean(k1) <= math.log(geometric[1])) and (
            k3 is None or k3_mean <= k3
        )

    def weight(row, d):
        if level is None:
            return 1.0
        w = math.exp(bounded(d if level == "token" else sum(row)))
        return min(w, cap) if band is None else (w if band[0] <= w <= band[1] else 0.0)

    def source(rows):
        weights = [[weight(row, d) if keeps(row) else 0.0 for d in row] for row in rows]
        return weights, tokens_of(rows) if bypass else tokens_of([row for row in rows if keeps(row)])

    return source


def slime(mode, use_rs):
    """examples/train_infer_mismatch_helper/mis.py with mis.yaml, but for the mean, which here is over what was kept;
    slime/backends/megatron_utils/loss.py divides by sums of `loss_masks`."""

    def source(rows):
        w = [[math.exp(bounded(d)) for d in row] for row in rows]
        keep = [[True] * len(row) for row in rows]
        if mode == "truncate":
            w = [[min(x, 2.0) for x in row] for row in w]
        elif mode == "clip":
            w = [[min(max(x, 0.5), 2.0) for x in row] for row in w]
        if mode == "mask" or use_rs:
            keep = [[0.5 <= math.exp(bounded(d)) <= 2.0 for d in row] for row in rows]
        if use_rs:
            keep = [[k and min(row) >= math.log(1e-4) for k in ks] for row, ks in zip(rows, keep, strict=True)]
        mean = fmean(x for pair in zip(w, keep, strict=True) for x, k in zip(*pair, strict=True) if k)
        mean = mean if mean > 1e-8 else 1.0
        return [
            [x / mean if k else 0.0 for x, k in zip(*pair, strict=True)] for pair in zip(w, keep, strict=True)
        ], tokens_of(rows)

    return source


def nemo_rl(kind, low, high):
    """nemo_rl/algorithms/loss/loss_functions.py: weights alone change, `mask` and `global_valid_toks` do not."""

    def one(row):
        w = [math.exp(d) for d in row]
        if kind == "tis":
            return [min(max(x, low), high) for x in w]
        if kind == "icepop":
            return [x if low <= x <= high else 0.0 for x in w]
        kept = low <= math.exp(fmean(row)) <= high
        return [x if kept else 0.0 for x in w]

    return lambda rows: ([one(row) for row in rows], tokens_of(rows))


def trl(mode):
    """trl/trainer/grpo_trainer.py, `vllm_importance_sampling_mode` with its cap of 3: the mask does not change."""
    level, action = mode.split("_")

    def one(row):
        w = [math.exp(d if level == "token" else sum(row)) for d in row]
        return [min(x, 3.0) if action == "truncate" else (x if x <= 3.0 else 0.0) for x in w]

    return lambda rows: ([one(row) for row in rows], tokens_of(rows))


GEOMETRIC = {"geometric": (0.999, 1.001)}
SOURCES = {
    "none": verl(),
    "verl/token_is": verl("token"),
    "verl/seq_is": verl("sequence"),
    "verl/token_icepop": verl("token", band=(0.5, 5.0)),
    "verl/geo_rs": verl(**GEOMETRIC),
    "verl/geo_rs_seq_tis": verl("sequence", **GEOMETRIC),
    "verl/geo_rs_token_tis": verl("token", **GEOMETRIC),
    "verl/k3_rs": verl(k3=0.01),
    "verl/k3_rs_seq_tis": verl("sequence", k3=0.01),
    "verl/k3_rs_token_tis": verl("token", k3=0.01),
    "verl/bypass_ppo_clip": verl(bypass=True),
    "verl/bypass_ppo_clip_geo_rs": verl(**GEOMETRIC, bypass=True),
    "verl/bypass_ppo_clip_k3_rs": verl(k3=0.01, bypass=True),
    "nemo_rl/tis": nemo_rl("tis", 0.0, 2.0),
    "nemo_rl/icepop": nemo_rl("icepop", 0.5, 5.0),
    "nemo_rl/seq-mask-tis": nemo_rl("seq-mask-tis", 0.999, 1.002),
    "trl/sequence_mask": trl("sequence_mask"),
    "trl/sequence_truncate": trl("sequence_truncate"),
    "trl/token_mask": trl("token_mask"),
    "trl/token_truncate": trl("token_truncate"),
    "slime/mis": slime("truncate", use_rs=True),
    "slime/clip": slime("clip", use_rs=False),
    "slime/mask": slime("mask", use_rs=False),
}
BYPASS = [name for name, entry in PRESETS.items() if entry.mode == "bypass" and name.startswith("verl/")]


def rows_of(seed, count=40):
    """Rows of every size of mismatch: each filter keeps some of them and rejects others."""
    r = random.Random(seed)
    spreads = (3e-4, 3e-3, 0.05, 0.3, 1.5, 6.0)
    return [[r.gauss(0, r.choice(spreads)) for _ in range(r.randint(1, 7))] for _ in range(count)] + [
        [r.gauss(0, spread) for _ in range(5)] for spread in spreads
    ]


def batch_of(rows, advantages=None):
    """Rows of log p_training - log p_rollout as a batch in FP64, padded with NaN."""
    width = max(len(row) for row in rows)
    d = torch.tensor([[*row, *[math.nan] * (width - len(row))] for row in rows], dtype=torch.float64)
    rollout = torch.full_like(d, -1.5)
    return RolloutBatch(
        sequences=TokenBatch.of([[0]] * len(rows), [[0] * len(row) for row in rows]),
        policy_mask=~d.isnan(),
        rollout_logprobs=rollout,
        old_logprobs=rollout + d,
        reference_logprobs=None,
        advantages=torch.zeros(len(rows)) if advantages is None else torch.tensor(advantages, dtype=torch.float64),
        row_mask=torch.ones(len(rows), dtype=torch.bool),
    )


def objective(name):
    loss = LossConfig(clip_low=LOW, clip_high=HIGH)
    return Objective(loss, CorrectionConfig(method="preset", preset=name))


def corrected_by(name, rows):
    corrected, _ = objective(name).corrected(batch_of(rows))
    weights = [w[: len(row)] for w, row in zip(corrected.weights.tolist(), rows, strict=True)]
    return weights, Denominator.of(corrected.loss_mask).tokens


def flat(rows):
    return [x for row in rows for x in row]


@pytest.mark.parametrize("name", PRESETS)
def test_weights_and_denominator_are_those_of_the_source(name):
    for seed in range(10):
        rows = rows_of(seed)
        weights, tokens = corrected_by(name, rows)
        expected, expected_tokens = SOURCES[name](rows)
        assert flat(weights) == pytest.approx(flat(expected), rel=1e-9, abs=1e-12)
        assert tokens == expected_tokens
        if PRESETS[name].filters:
            assert 0 in flat(expected)
            assert any(flat(expected))


def test_verl_s_band_is_on_the_inverse_ratio():
    """rho = exp(0.0010002) is above 1.001, but 1/rho is above 0.999."""
    assert 1.001 < math.exp(0.0010002) < 1 / 0.999
    assert corrected_by("verl/geo_rs", [[0.0010002]])[0] == [[1.0]]
    assert corrected_by("verl/geo_rs", [[-0.0010002]])[0] == [[0.0]]


def verl_bypass_loss(name, rows, current, advantages):
    """Loss and its derivative by each log-prob: verl/trainer/ppo/core_algos.py, `compute_policy_loss_bypass_mode`.

    The ratio is that of `log_prob`, the policy that is updated, at every call; the weights carry no gradient.
    """
    weights, tokens = SOURCES[name](current)
    loss, gradient = 0.0, []
    for row, ws, a in zip(current, weights, advantages, strict=True):
        slopes = []
        for d, w in zip(row, ws, strict=True):
            ratio = math.exp(bounded(d))
            clipped = min(max(ratio, 1 - LOW), 1 + HIGH)
            # SOURCES has 1 or 0 here: this loss takes no weights.
            loss += w * max(-a * ratio, -a * clipped) / tokens
            slopes.append(0.0 if -a * clipped > -a * ratio else -w * a * ratio / tokens)
        gradient.append(slopes)
    return loss, gradient


@pytest.mark.parametrize("name", BYPASS)
def test_bypass_corrects_for_the_policy_of_each_update(name):
    """Three updates of one rollout: the policy has moved by more each time, and weights and rejection with it."""
    rows, r = rows_of(3), random.Random(4)
    advantages = [r.gauss(0, 1) for _ in rows]
    built = objective(name)
    batch, _ = built.corrected(batch_of(rows, advantages))
    found = []
    parts = [slice(0, 11), slice(11, 12), slice(12, len(rows))]
    for step in (0.0, 0.002, 0.5):
        moved = [[d + r.gauss(0, step) for d in row] for row in rows]
        current = batch_of(moved).old_logprobs.requires_grad_()
        terms = built(current, batch, Denominator.of(batch.policy_mask))
        terms.loss.backward()
        loss, gradient = verl_bypass_loss(name, rows, moved, advantages)
        assert float(terms.loss.detach()) == pytest.approx(loss, rel=1e-9, abs=1e-12)
        assert current.grad[batch.policy_mask].tolist() == pytest.approx(flat(gradient), rel=1e-9, abs=1e-12)
        assert not current.grad[~batch.policy_mask].any()
        weights = flat(SOURCES[name](moved)[0])
        assert float(terms.weight_mean) == pytest.approx(fmean(weights), rel=1e-9)
        assert float(terms.zero_weight_fraction) == pytest.approx(weights.count(0.0) / len(weights))
        totals: dict[str, float] = {}
        for part in parts:
            share = built(current[part], batch.rows(part), Denominator.of(batch.policy_mask))
            totals = merge_totals(totals, share.statistics())
        assert totals == pytest.approx(terms.statistics(), rel=1e-9, abs=1e-12)
        found.append(weights)
    assert (found[0] != found[2]) == (name != "verl/bypass_ppo_clip")
