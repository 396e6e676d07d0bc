"""What the steps compute from their tables, without a run around them."""

import math
from statistics import fmean, pstdev, stdev

import pyarrow as pa
import pytest
import torch

from fp8core.config.load import load_config
from fp8core.errors import UserError
from fp8core.run.step_metrics import mismatch, reward_metrics, rollout_metrics
from fp8core.run.update_inputs import counted_rows, rollout_batch
from fp8core.run.verdicts import counts
from fp8core.store.tables import LOGPROBS, REWARDS, ROLLOUTS
from tasks.filter import FilterOptions, filter, keep_informative
from tasks.shape import ShapeOptions, shaped


def rewards_table(*rows):
    """(group, reward, keep) per completion."""
    filled = [
        {"group": g, "sample": i, "reward": r, "outcome": "right", "detail": "", "keep": keep}
        for i, (g, r, keep) in enumerate(rows)
    ]
    return pa.Table.from_pylist(filled, schema=REWARDS)


def rollouts_table(*rows):
    """(tokens, logprobs, written, finish) per completion of group 0."""
    filled = [
        {
            "group": 0, "sample": i, "prompt_id": "p", "seed": i, "prompt_tokens": [3, 4], "tokens": tokens,
            "logprobs": logprobs, "written": written, "finish": finish, "text": "",
        }
        for i, (tokens, logprobs, written, finish) in enumerate(rows)
    ]  # fmt: skip
    return pa.Table.from_pylist(filled, schema=ROLLOUTS)


def logprobs_table(*rows):
    filled = [
        {"group": 0, "sample": i, "logprobs": logprobs, "entropy": entropy}
        for i, (logprobs, entropy) in enumerate(rows)
    ]
    return pa.Table.from_pylist(filled, schema=LOGPROBS)


def kept(table):
    return [row["keep"] for row in table.to_pylist()]


def test_filter_keeps_the_first_groups_with_a_signal():
    table = rewards_table(
        (0, 1.0, True), (0, 1.0, True), (1, 1.0, True), (1, 0.0, True), (2, 0.0, True), (2, 1.0, True)
    )
    assert kept(keep_informative(table, 1)) == [False, False, True, True, False, False]


@pytest.mark.parametrize("baseline", ["all", "kept"])
def test_rows_that_left_the_loss_leave_the_baseline_and_make_no_signal(baseline):
    """Group 0 differs from a row alone that is not kept, group 1 has none that is, group 2 differs without one."""
    table = rewards_table(
        *((0, 1.0, True), (0, 1.0, True), (0, 0.0, False), (1, 1.0, False), (1, 0.0, False), (1, 0.0, False)),
        *((2, 1.0, True), (2, 0.0, True), (2, 0.0, False)),
    )
    config = load_config("tiny", {"correction.baseline": baseline, "loss.advantage": "dr_grpo"})
    rollouts = rollouts_table(*(([5, 6], [-1.0] * 2, [True] * 2, "stop") for _ in range(9)))
    logprobs = logprobs_table(*(([-1.0] * 2, [0.1] * 2) for _ in range(9)))
    batch, _ = rollout_batch(rollouts, table, logprobs, None, config)
    assert batch.advantages.tolist() == [0.0] * 6 + [0.5, -0.5, 0.0]
    assert reward_metrics(table, config)["reward/groups_with_signal"] == 1 / 3
    for compared in (None, torch.ones(9, dtype=torch.bool), counted_rows(table, config)):
        assert kept(keep_informative(table, 1, None, compared)) == [False] * 6 + [True, True, False]


@pytest.mark.parametrize("failed", ["leave_out", "count"])
@pytest.mark.parametrize("baseline", ["all", "kept"])
def test_an_episode_whose_environment_failed_moves_no_baseline(baseline, failed):
    """Group 0 differs by a crash alone. In group 1 a crash would be the best of all: it had a penalty less."""
    rows = [("wrong", 0, -1.75), ("wrong", 0, -1.75), ("crashed", 0, -0.25)]
    rows += [("wrong", 1, -1.75), ("right", 1, -0.75), ("timeout", 1, -0.25)]
    config = load_config(
        "tiny", {"environment": {"name": "calculator", "failed": failed}, "correction.baseline": baseline}
    )
    table = pa.Table.from_pylist(
        [
            {**{"group": group, "sample": i, "reward": reward, "outcome": outcome, "detail": ""}}
            | {"keep": counts(outcome, config)}
            for i, (outcome, group, reward) in enumerate(rows)
        ],
        schema=REWARDS,
    )
    rollouts = rollouts_table(*(([5, 6], [-1.0] * 2, [True] * 2, "stop") for _ in rows))
    logprobs = logprobs_table(*(([-1.0] * 2, [0.1] * 2) for _ in rows))
    batch, _ = rollout_batch(rollouts, table, logprobs, None, config)
    signs = (batch.advantages.sign() * batch.keep).tolist()
    assert signs == ([0, 0, 0, -1, 1, 0] if failed == "leave_out" else [-1, -1, 1, -1, 1, 1])
    metrics, counted = reward_metrics(table, config), [1, 1, 0, 1, 1, 0] if failed == "leave_out" else [1] * 6
    assert metrics["reward/groups_with_signal"] == (0.5 if failed == "leave_out" else 1)
    spread = pstdev(reward for (_, _, reward), one in zip(rows, counted, strict=True) if one)
    assert metrics["reward/std"] == pytest.approx(spread)
    compared = None if baseline == "kept" else counted_rows(table, config)
    assert kept(keep_informative(table, None, compared=compared)) == [sign != 0 for sign in signs]


def test_a_shortfall_is_fewer_groups_than_are_wanted(run_copy):
    table = rewards_table((0, 1.0, True), (0, 0.0, True), (1, 1.0, True), (1, 0.0, True), (2, 1.0, True))
    with run_copy.opened() as run:
        rewards = run.directory.store.put_table("rewards", table)
        found = filter(run, 5, FilterOptions(groups=2, shortfall="error"), rewards)["filtered"]
        assert kept(run.directory.store.get_table(found)) == [True] * 4 + [False]
        with pytest.raises(UserError, match="2 of 3 wanted groups have scores that differ"):
            filter(run, 5, FilterOptions(groups=3, shortfall="error"), rewards)
        assert filter(run, 5, FilterOptions(groups=3), rewards)["filtered"] == found


def test_with_advantages_by_turn_a_signal_is_one_of_a_turn():
    """Group 0 earns as much in other turns. Group 1 differs only in what the environment gave before the policy spoke.

    In group 2 one episode alone has a second turn, and the first turns are equal.
    """
    earned = [
        (0, 0.0, 1.0, 0.0),
        (0, 0.0, 0.0, 1.0),
        (1, 1.0, 0.0, 0.0),
        (1, 0.0, 0.0, 0.0),
        (2, 0.0, 1.0),
        (2, 0.0, 1.0, 0.0),
    ]
    rewards = rewards_table(*((group, sum(each), True) for group, *each in earned))
    turns = pa.Table.from_pylist(
        [
            {"group": group, "sample": sample, "turn": turn, "begin": max(0, turn - 1), "end": turn, "reward": reward}
            for sample, (group, *each) in enumerate(earned)
            for turn, reward in enumerate(each)
        ]
    )
    rollouts = rollouts_table(*(([5, 6], [-1.0] * 2, [True] * 2, "stop") for _ in earned))
    logprobs = logprobs_table(*(([-1.0] * 2, [0.1] * 2) for _ in earned))
    config = load_config("tiny", {"environment": {"name": "calculator", "advantage": "turn"}})
    batch, _ = rollout_batch(rollouts, rewards, logprobs, None, config, turns)
    assert batch.advantages.any(dim=1).tolist() == [True, True, False, False, False, False]
    assert kept(keep_informative(rewards, None, turns)) == batch.advantages.any(dim=1).tolist()
    assert kept(keep_informative(rewards, None)) == [False, False, True, True, False, False]
    assert reward_metrics(rewards, config, turns)["reward/groups_with_signal"] == 1 / 3


def test_shape_takes_the_linear_penalty_and_drops_what_was_cut_off():
    rollouts = rollouts_table(
        *(([5] * n, [-1.0] * n, [True] * n, finish) for n, finish in ((2, "stop"), (7, "stop"), (8, "length")))
    )
    options = ShapeOptions(max_length=8, buffer=4, penalty=2.0, drop_cut_off=True)
    table = shaped(rollouts, rewards_table((0, 1.0, True), (0, 1.0, True), (0, 1.0, True)), options)
    assert table["reward"].to_pylist() == [1.0, -0.5, -1.0]
    assert kept(table) == [True, True, False]


def test_shape_measures_what_the_policy_wrote():
    written = [True, True, False, False, False, False, False, True]
    rollouts = rollouts_table(([5] * 8, [-1.0] * 8, written, "stop"), ([5] * 8, [-1.0] * 8, [True] * 8, "stop"))
    rewards = rewards_table((0, 1.0, True), (0, 1.0, True))
    assert shaped(rollouts, rewards, ShapeOptions(max_length=8, buffer=4))["reward"].to_pylist() == [1.0, 0.0]


@pytest.fixture
def with_tool_output():
    """Tokens 8 and 9 came from a tool: their log-probs are not numbers anybody should use."""
    nan = math.nan
    rollouts = rollouts_table(
        ([5, 8, 9, 6], [-0.5, nan, nan, -0.7], [True, False, False, True], "stop"),
        ([5, 6], [-0.4, -0.6], [True, True], "stop"),
    )
    return rollouts, logprobs_table(([-0.5, -3.0, -9.0, -0.8], [0.2, 7.0, 7.0, 0.4]), ([-0.4, -0.6], [0.6, 0.8]))


@pytest.fixture
def without_tool_output():
    rollouts = rollouts_table(
        ([5, 6], [-0.5, -0.7], [True, True], "stop"), ([5, 6], [-0.4, -0.6], [True, True], "stop")
    )
    return rollouts, logprobs_table(([-0.5, -0.8], [0.2, 0.4]), ([-0.4, -0.6], [0.6, 0.8]))


def test_tokens_of_tools_stay_out_of_every_metric(with_tool_output, without_tool_output):
    rows = torch.tensor([True, True])
    assert mismatch(*with_tool_output, rows, 2.0) == mismatch(*without_tool_output, rows, 2.0)
    assert rollout_metrics(*with_tool_output) == rollout_metrics(*without_tool_output)


def test_tokens_of_tools_stay_out_of_the_loss(with_tool_output):
    rollouts, logprobs = with_tool_output
    rewards = rewards_table((0, 1.0, True), (0, 0.0, True))
    batch, _ = rollout_batch(rollouts, rewards, logprobs, None, load_config("tiny"))
    assert batch.mask.tolist() == [[True, False, False, True], [True, True, False, False]]
    assert batch.sequences.completion.sum() == 6, "they stay in the context"


def test_rejected_rows_leave_the_baseline_when_asked():
    rollouts = rollouts_table(*(([5], [value], [True], "stop") for value in (-0.5, -0.5, -9.0)))
    logprobs = logprobs_table(*(([-0.5], [0.1]) for _ in range(3)))
    rewards = rewards_table((0, 1.0, True), (0, 0.0, True), (0, 100.0, True))
    veto = {"correction.method": "custom", "correction.filters": [{"name": "seq_mean_k1", "low": 0.5, "high": 2.0}]}
    means = {}
    for baseline in ("all", "kept"):
        config = load_config("tiny", {**veto, "correction.baseline": baseline, "loss.advantage": "dr_grpo"})
        means[baseline] = rollout_batch(rollouts, rewards, logprobs, None, config)[0].advantages.tolist()
    assert means["kept"] == [0.5, -0.5, 0.0]
    assert means["all"] == pytest.approx([1 - 101 / 3, -101 / 3, 100 - 101 / 3], rel=1e-6)


def test_rows_of_large_error_leave_the_loss_and_are_counted_as_nemo_rl_does():
    """nemo_rl/algorithms/grpo.py, `compute_and_apply_seq_logprob_error_masking`, here row by row.

    The third row is within the bound by its written tokens, and the last was out before.
    """
    differences = [(0.1, -0.2), (1.5, 0.0), (0.05, 9.0), (-0.9, -0.9), (3.0, 3.0)]
    written = [[True, True], [True, True], [True, False], [True, True], [True, True]]
    scores = [1.0, 1.0, 0.0, 0.0, 1.0]
    rollouts = rollouts_table(*(([5, 6], [-2.0, -2.0], row, "stop") for row in written))
    logprobs = logprobs_table(*(([-2.0 + a, -2.0 + b], [0.1, 0.1]) for a, b in differences))
    rewards = rewards_table(*((0, score, i != 4) for i, score in enumerate(scores)))
    errors = [
        fmean(math.exp(abs(d)) for d, w in zip(row, mask, strict=True) if w)
        for row, mask in zip(differences, written, strict=True)
    ]
    kept = [error for error in errors[:4] if error <= 2.0]
    masked = [i for i in range(4) if errors[i] > 2.0]
    assert masked == [1, 3]
    config = load_config("tiny", {"correction.seq_logprob_error_threshold": 2.0, "loss.advantage": "dr_grpo"})
    batch, metrics = rollout_batch(rollouts, rewards, logprobs, None, config)
    assert batch.keep.tolist() == [True, False, True, False, False]
    assert metrics == pytest.approx(
        {
            "max_seq_mult_prob_error_after_mask": max(kept),
            "mean_seq_mult_prob_error_after_mask": fmean(kept),
            "min_seq_mult_prob_error_after_mask": min(kept),
            "num_masked_seqs_by_logprob_error": 2,
            "masked_correct_pct": fmean(scores[i] == 1 for i in masked),
        },
        rel=1e-6,
    )
    # The correction's rows stay in the baseline; one that was out before does not.
    assert batch.advantages.tolist() == pytest.approx([score - 0.5 for score in scores[:4]] + [0.0])
    alone = config.model_copy(update={"correction": config.correction.model_copy(update={"baseline": "kept"})})
    among_kept = rollout_batch(rollouts, rewards, logprobs, None, alone)[0].advantages
    assert among_kept.tolist() == pytest.approx([0.5, 0.0, -0.5, 0.0, 0.0])


def test_the_divergence_is_taken_off_the_rewards_before_advantages():
    """Rewards 1 and 0, less 0.5 times the sum of old - reference over what was written."""
    rollouts = rollouts_table(
        ([5, 6], [-1.0, -1.0], [True, True], "stop"), ([5, 6], [-1.0, -1.0], [True, False], "stop")
    )
    logprobs = logprobs_table(([-1.0, -2.0], [0.1, 0.1]), ([-1.0, -2.0], [0.1, 0.1]))
    reference = logprobs_table(([-1.5, -2.25], [0.1, 0.1]), ([-0.5, -9.0], [0.1, 0.1]))
    rewards = rewards_table((0, 1.0, True), (0, 0.0, True))
    settings = {"loss.reward_kl": 0.5, "loss.advantage": "dr_grpo"}
    batch, _ = rollout_batch(rollouts, rewards, logprobs, reference, load_config("tiny", settings))
    totals = [1.0 - 0.5 * (0.5 + 0.25), 0.0 - 0.5 * -0.5]
    assert batch.advantages.tolist() == pytest.approx([(totals[0] - totals[1]) / 2, (totals[1] - totals[0]) / 2])
    by_token = settings | {"loss.advantage": "reinforce_plus_plus"}
    batch, _ = rollout_batch(rollouts, rewards, logprobs, reference, load_config("tiny", by_token))
    assert batch.advantages.shape == (2, 2)
    returns = [1.0 - 0.5 * 0.75, 1.0 - 0.5 * 0.25, 0.25]
    ranked = batch.advantages[batch.mask]
    assert ranked.sum() == pytest.approx(0.0, abs=1e-6)
    assert ranked[1] - ranked[0] == pytest.approx((returns[1] - returns[0]) / stdev(returns), rel=1e-3)
    with pytest.raises(AssertionError, match="needs the reference step"):
        rollout_batch(rollouts, rewards, logprobs, None, load_config("tiny", settings))


def test_the_reference_is_the_first_policy_at_the_temperature_of_the_rollout(loop_run):
    step = {"name": "reference", "uses": "tasks.reference:reference", "needs": ["rollouts", "scales"]}
    run = loop_run(
        "referred",
        **{"rollout.temperature": 0.7, "loss.entropy": 1.0, "training.warmup_steps": 0, "steps": 2},
        pipeline={"insert": [{"after": "rollout", "step": step}]},
    )
    scores = [
        [run.store.get_table(run.ledger.artifacts(index)[name])["logprobs"] for name in ("logprobs", "reference")]
        for index in (1, 2)
    ]
    assert scores[0][0] == scores[0][1], "before the first update both are one policy"
    assert scores[1][0] != scores[1][1]
