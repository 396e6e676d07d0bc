"""What the steps compute from their tables, without a run around them."""

import math
from statistics import pstdev

import pyarrow as pa
import pytest
import torch

from fp8core.config.load import load_config
from fp8core.metrics.reward import reward_metrics
from fp8core.run.batches import baseline_mask, rollout_batch
from fp8core.run.rollouts import counts
from fp8core.store.tables import LOGPROBS, REWARDS, ROLLOUTS
from tasks.filter import FilterOptions, filter, keep_informative
from tasks.shape import ShapeOptions, shape_rewards


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


def test_rows_that_left_the_loss_leave_the_baseline_and_make_no_signal():
    """Group 0 differs from a row alone that is not kept, group 1 has none that is, group 2 differs without one."""
    table = rewards_table(
        *((0, 1.0, True), (0, 1.0, True), (0, 0.0, False), (1, 1.0, False), (1, 0.0, False), (1, 0.0, False)),
        *((2, 1.0, True), (2, 0.0, True), (2, 0.0, False)),
    )
    config = load_config("tiny", {"loss.advantage": "dr_grpo"})
    rollouts = rollouts_table(*(([5, 6], [-1.0] * 2, [True] * 2, "stop") for _ in range(9)))
    logprobs = logprobs_table(*(([-1.0] * 2, [0.1] * 2) for _ in range(9)))
    batch = rollout_batch(rollouts, table, logprobs, {}, config)
    assert batch.advantages.tolist() == [0.0] * 6 + [0.5, -0.5, 0.0]
    assert reward_metrics(table, baseline_mask(table, config))["reward/groups_with_signal"] == 1 / 3
    for compared in (torch.ones(9, dtype=torch.bool), baseline_mask(table, config)):
        assert kept(keep_informative(table, 1, compared)) == [False] * 6 + [True, True, False]


@pytest.mark.parametrize("failed", ["leave_out", "count"])
def test_an_episode_whose_environment_failed_moves_no_baseline(failed):
    """Group 0 differs by a crash alone. In group 1 a crash would be the best of all: it had a penalty less."""
    rows = [("wrong", 0, -1.75), ("wrong", 0, -1.75), ("crashed", 0, -0.25)]
    rows += [("wrong", 1, -1.75), ("right", 1, -0.75), ("timeout", 1, -0.25)]
    config = load_config("tiny", {"environment": {"name": "calculator", "failed": failed}})
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
    batch = rollout_batch(rollouts, table, logprobs, {}, config)
    signs = (batch.advantages.sign() * batch.row_mask).tolist()
    assert signs == ([0, 0, 0, -1, 1, 0] if failed == "leave_out" else [-1, -1, 1, -1, 1, 1])
    metrics = reward_metrics(table, baseline_mask(table, config))
    counted = [1, 1, 0, 1, 1, 0] if failed == "leave_out" else [1] * 6
    assert metrics["reward/groups_with_signal"] == (0.5 if failed == "leave_out" else 1)
    spread = pstdev(reward for (_, _, reward), one in zip(rows, counted, strict=True) if one)
    assert metrics["reward/std"] == pytest.approx(spread)
    assert kept(keep_informative(table, None, baseline_mask(table, config))) == [sign != 0 for sign in signs]


def test_the_first_groups_with_a_signal_stay(run_copy):
    table = rewards_table((0, 1.0, True), (0, 0.0, True), (1, 1.0, True), (1, 0.0, True), (2, 1.0, True))
    with run_copy.opened() as run:
        rewards = run.store.put_table("rewards", table)
        found = filter(run, 5, FilterOptions(groups=2), rewards)["filtered"]
        assert kept(run.store.get_table(found)) == [True] * 4 + [False]
        assert filter(run, 5, FilterOptions(groups=3), rewards)["filtered"] == found


def test_shape_takes_the_linear_penalty_and_drops_what_was_cut_off():
    rollouts = rollouts_table(
        *(([5] * n, [-1.0] * n, [True] * n, finish) for n, finish in ((2, "stop"), (7, "stop"), (8, "length")))
    )
    options = ShapeOptions(max_length=8, buffer=4, penalty=2.0, drop_cut_off=True)
    table = shape_rewards(rollouts, rewards_table((0, 1.0, True), (0, 1.0, True), (0, 1.0, True)), options)
    assert table["reward"].to_pylist() == [1.0, -0.5, -1.0]
    assert kept(table) == [True, True, False]


@pytest.fixture
def with_tool_output():
    """Tokens 8 and 9 came from a tool: their log-probs are not numbers anybody should use."""
    nan = math.nan
    rollouts = rollouts_table(
        ([5, 8, 9, 6], [-0.5, nan, nan, -0.7], [True, False, False, True], "stop"),
        ([5, 6], [-0.4, -0.6], [True, True], "stop"),
    )
    return rollouts, logprobs_table(([-0.5, -3.0, -9.0, -0.8], [0.2, 7.0, 7.0, 0.4]), ([-0.4, -0.6], [0.6, 0.8]))


def test_tokens_of_tools_stay_out_of_the_loss(with_tool_output):
    rollouts, logprobs = with_tool_output
    rewards = rewards_table((0, 1.0, True), (0, 0.0, True))
    batch = rollout_batch(rollouts, rewards, logprobs, {}, load_config("tiny"))
    assert batch.policy_mask.tolist() == [[True, False, False, True], [True, True, False, False]]
    assert batch.sequences.response_mask.sum() == 6, "they stay in the context"
