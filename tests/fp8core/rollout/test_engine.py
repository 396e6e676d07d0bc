"""What every engine shares: requests, and the lengths that a setting allows."""

import pytest

from fp8core.errors import UserError
from fp8core.rollout.engine import PromptGroup, check_lengths

GROUP = PromptGroup(
    group=3,
    prompt_id="p",
    prompt=(7, 8),
    samples=(2, 5, 6),
    seeds=(12, 15, 16),
    begun=((2,), (5,), (6,)),
    room=(102, 105, 106),
)


def test_a_group_without_some_samples_keeps_what_belongs_to_the_others():
    left = GROUP.without({5, 0})
    assert (left.samples, left.seeds, left.begun, left.room) == ((2, 6), (12, 16), ((2,), (6,)), (102, 106))
    assert GROUP.without({2, 5, 6}).samples == ()
    assert GROUP.without(()) == GROUP


def test_a_completion_may_take_all_that_the_setting_allows():
    check_lengths([GROUP], 8, "context", 10)
    with pytest.raises(UserError, match=r"^prompt p: 2 tokens and rollout\.max_new_tokens=9 are 11, context is 10$"):
        check_lengths([GROUP], 9, "context", 10)
