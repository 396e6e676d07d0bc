"""The forward of an update gives the log-probs and the statistics that a pass of its own gives, in every trainer."""

import hashlib
import itertools
from dataclasses import asdict, replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from fp8core.config.loss import LossConfig
from fp8core.config.precision import PrecisionContract, SidePrecision, TrainingPrecision
from fp8core.config.training import CorrectionConfig, FilterConfig, TrainingConfig
from fp8core.rl.objective import Objective
from fp8core.training.trainer import LogprobError

FP8 = PrecisionContract(rounding_points="kernels")
BF16 = PrecisionContract(
    rollout=SidePrecision(linear="bf16", kv_cache="bf16"),
    training=TrainingPrecision(linear="bf16", kv_cache="bf16"),
    rounding_points="kernels",
)
CASES = {
    "exact": {"micro_batch": 2},
    "packed": {"tokens_per_pass": 128},
    "recomputed": {"tokens_per_pass": 128, "activation_checkpointing": True},
}
TOKENS = FilterConfig(name="token_k1", low=0.5, high=2.0)
OBJECTIVES = {
    "token_tis": (LossConfig(entropy=0.1), CorrectionConfig()),
    "rejecting": (LossConfig(), CorrectionConfig(method="custom", filters=[TOKENS], denominator="all")),
    "bypass": (LossConfig(policy="reinforce"), CorrectionConfig(method="custom", mode="bypass")),
}


@pytest.fixture(params=CASES)
def trainers(request, architecture, trainer_of, packed_of, first_scales, rollout_batch):
    """Of a contract and an objective: a function that makes equal trainers, a batch and scales."""

    def prepared(contract, objective, minibatches=1, epochs=1):
        arch = architecture()
        training = TrainingConfig(**CASES[request.param], minibatches=minibatches, epochs=epochs)
        make = trainer_of if request.param == "exact" else packed_of
        exact = trainer_of(contract, arch)
        scales = first_scales(exact, contract)
        batch = replace(rollout_batch(exact, scales), row_mask=torch.tensor([True, False, True, True, True, False]))
        return SimpleNamespace(
            build=partial(make, contract, arch, training, objective), batch=batch, scales=scales.layers
        )

    return prepared


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(("contract", "epochs"), [(FP8, 1), (BF16, 1), (FP8, 2)], ids=["fp8", "bf16", "two passes"])
def test_an_update_scores_as_a_pass_and_learns_as_after_it(trainers, contract, epochs, objective) -> None:
    """The first forward gives the old log-probs of all passes."""
    case = trainers(contract, Objective(*OBJECTIVES[objective]), epochs=epochs)
    passing, scoring = case.build(), case.build()
    expected = passing.logprobs(case.batch.sequences, 0.9, case.scales)
    report = passing.step(replace(case.batch, old_logprobs=expected.logprobs), 0.9, case.scales)
    learnt, scored = scoring.scored_step(replace(case.batch, old_logprobs=None), 0.9, case.scales)
    for name in ("logprobs", "entropy"):
        found, wanted = (getattr(each, name).view(torch.int32) for each in (scored, expected))
        assert torch.equal(found, wanted), "also of rows that no loss reads"
    assert scored.statistics.amax() == expected.statistics.amax()
    assert scored.statistics.saturated_share() == expected.statistics.saturated_share()
    assert asdict(learnt) == asdict(report)
    assert scoring.digest() == passing.digest()


@pytest.mark.parametrize("liar", [0, 2, 5], ids=["first update", "second update", "last update"])
def test_audited_rows_of_all_updates_are_compared_before_the_first(trainers, liar) -> None:
    case = trainers(FP8, Objective(*OBJECTIVES["token_tis"]), minibatches=3)
    trainer = case.build()
    policy, given = trainer.digest(), trainer.logprobs(case.batch.sequences, 1.0, case.scales).logprobs.nan_to_num()
    batch = replace(case.batch, rollout_logprobs=given.clone(), old_logprobs=given)
    batch.rollout_logprobs[liar, 0] = torch.nextafter(given[liar, 0], torch.tensor(0.0))
    named = rf"^update 0 of policy 0: row {liar}, token 0: .*; the update was not applied$"
    with pytest.raises(LogprobError, match=named):
        trainer.scored_step(replace(batch, audited={row: f"row {row}" for row in (0, 2, 3, 5)}), 1.0, case.scales)
    assert (trainer.version, trainer.digest()) == (0, policy)
    report, _ = trainer.scored_step(replace(batch, audited={3: "row 3"}), 1.0, case.scales)
    assert report.version == 1


@pytest.mark.parametrize(
    ("keep", "updates"),
    [
        ([True] * 6, [slice(0, 1), slice(1, 3), slice(3, 4), slice(4, 6)]),
        ([False, False, False, True, True, True], [slice(0, 4), slice(4, 5), slice(5, 6)]),
        ([False, True, False, False, False, False], [slice(0, 6)]),
        ([False] * 6, []),
    ],
    ids=["all", "three", "one", "none"],
)
def test_each_update_has_rows_that_are_in_the_loss(trainers, keep, updates) -> None:
    """A share of them; no update is of dropped rows alone."""
    objective = Objective(*OBJECTIVES["token_tis"])
    case = trainers(FP8, objective, minibatches=4)
    batch = replace(case.batch, row_mask=torch.tensor(keep))
    single, plain, scoring = trainers(FP8, objective).build(), case.build(), case.build()
    alone = [single.step(batch.rows(rows), 0.9, case.scales) for rows in updates]
    expected = plain.logprobs(batch.sequences, 0.9, case.scales)
    report = plain.step(batch, 0.9, case.scales)
    learnt, scored = scoring.scored_step(batch, 0.9, case.scales)
    assert asdict(learnt) == asdict(report)
    assert scoring.digest() == plain.digest() == single.digest()
    assert (report.version, report.rows) == (1, sum(keep))
    for name in ("loss", "grad_norm", "ratio_mean", "weight_mean"):
        values = [getattr(each, name) for each in alone]
        assert getattr(report, name) == pytest.approx(sum(values) / max(len(values), 1)), name
    assert report.learning_rate == (alone[-1].learning_rate if alone else 0.0)
    assert report.first_ratio_bias == (alone[0].first_ratio_bias if alone else 0.0)
    assert scored.logprobs.shape == expected.logprobs.shape
    if not updates:
        assert torch.equal(scored.logprobs.nan_to_num(), expected.logprobs.nan_to_num())
        assert report.digest == case.build().digest(), "nothing moves the policy"


def later_pass(rows, of_pass, count):
    """The minibatches of a pass of step 1 under seed 0, as the documentation has them."""

    def key(row):
        return hashlib.sha256(f"pass/0/0/{of_pass}/{row}".encode()).digest()

    order = sorted(rows, key=key)
    bounds = [len(rows) * i // count for i in range(count + 1)]
    return [sorted(order[first:last]) for first, last in itertools.pairwise(bounds)]


def test_later_passes_are_updates_of_minibatches_drawn_anew(trainers) -> None:
    """Equal to a loop of single updates whose old log-probs are those before the first."""
    objective = Objective(*OBJECTIVES["token_tis"])
    case = trainers(FP8, objective, minibatches=2, epochs=3)
    single, plain, scoring = trainers(FP8, objective).build(), case.build(), case.build()
    first = [[0, 1, 2], [3, 4, 5]]
    later = [later_pass([0, 2, 3, 4], each, 2) for each in (1, 2)]
    assert later[0] != later[1], "each pass draws its own"
    alone = [single.step(case.batch.rows(rows), 0.9, case.scales) for each in (first, *later) for rows in each]
    report = plain.step(case.batch, 0.9, case.scales)
    learnt, _ = scoring.scored_step(case.batch, 0.9, case.scales)
    assert asdict(learnt) == asdict(report)
    assert plain.digest() == scoring.digest() == single.digest()
    assert report.version == 1
    assert report.learning_rate == alone[-1].learning_rate, "warm-up counts every update"
    assert report.first_ratio_deviation == alone[0].first_ratio_deviation
    assert report.clip_fraction == pytest.approx(sum(each.clip_fraction for each in alone) / 6)
    assert report.last_ratio_deviation == pytest.approx(sum(each.first_ratio_deviation for each in alone[4:]) / 2)
    assert report.last_ratio_deviation > report.first_ratio_deviation
