"""What the steps compute from their tables, without a run around them."""

import math

import pyarrow as pa
import pytest

from fp8core.config.load import load_config
from fp8core.store.tables import LOGPROBS, REWARDS, ROLLOUTS
from tasks.filter import keep_informative
from tasks.record import mismatch, rollout_metrics
from tasks.shape import ShapeOptions, shaped
from tasks.train import rollout_batch


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


def test_filter_keeps_groups_whose_rewards_differ():
    table = rewards_table(
        (0, 1.0, True), (0, 0.0, True), (1, 1.0, True), (1, 1.0, True), (2, 0.0, True), (2, 1.0, True)
    )
    assert kept(keep_informative(table, None)) == [True, True, False, False, True, True]


def test_filter_keeps_the_first_groups_with_a_signal():
    table = rewards_table(
        (0, 1.0, True), (0, 1.0, True), (1, 1.0, True), (1, 0.0, True), (2, 0.0, True), (2, 1.0, True)
    )
    assert kept(keep_informative(table, 1)) == [False, False, True, True, False, False]


def test_filter_looks_at_kept_rows_only_and_restores_none():
    table = rewards_table((0, 1.0, True), (0, 1.0, True), (0, 0.0, False))
    assert kept(keep_informative(table, None)) == [False, False, False]


def test_shape_takes_the_linear_penalty_and_drops_what_was_cut_off():
    rollouts = rollouts_table(
        *(([5] * n, [-1.0] * n, [True] * n, finish) for n, finish in ((2, "stop"), (7, "stop"), (8, "length")))
    )
    options = ShapeOptions(max_length=8, buffer=4, penalty=2.0, drop_cut_off=True)
    table = shaped(rollouts, rewards_table((0, 1.0, True), (0, 1.0, True), (0, 1.0, True)), options)
    assert table["reward"].to_pylist() == [1.0, -0.5, -1.0]
    assert kept(table) == [True, True, False]


def test_shape_refuses_a_buffer_above_the_length():
    with pytest.raises(ValueError, match="above max_length"):
        ShapeOptions(max_length=4, buffer=5)


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
    assert mismatch(*with_tool_output) == mismatch(*without_tool_output)
    assert rollout_metrics(*with_tool_output) == rollout_metrics(*without_tool_output)


def test_tokens_of_tools_stay_out_of_the_loss(with_tool_output):
    rollouts, logprobs = with_tool_output
    rewards = rewards_table((0, 1.0, True), (0, 0.0, True))
    batch = rollout_batch(rollouts, rewards, logprobs, None, load_config("tiny"))
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
        means[baseline] = rollout_batch(rollouts, rewards, logprobs, None, config).advantages.tolist()
    assert means["kept"] == [0.5, -0.5, 0.0]
    assert means["all"] == pytest.approx([1 - 101 / 3, -101 / 3, 100 - 101 / 3], rel=1e-6)
