"""Drafts in vLLM: what is accepted, how long they are, and that completions do not depend on them."""

import multiprocessing

import pytest
import torch
from conftest import ON_GPU, SHAPE
from second_runner import DRAFT_TOKENS, LARGEST_BATCH, compute

from fp8core.models.architecture import Architecture

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(ON_GPU, reason="tests/gpu/test_speculation.py runs all of it")]


def test_completions_do_not_depend_on_drafts(vllm_build, tmp_path):
    process = multiprocessing.get_context("spawn").Process(target=compute, args=(tmp_path, Architecture(**SHAPE)))
    process.start()
    process.join(600)
    assert process.exitcode == 0
    without, with_drafts = torch.load(tmp_path / "generations.pt")
    ((expected, _),) = without["found"]
    assert {reason for _, _, reason in expected.values()} == {"stop", "length"}
    for found, _ in with_drafts["found"]:
        assert found.keys() == expected.keys()
        for name, (tokens, logprobs, reason) in found.items():
            assert (tokens, reason) == (expected[name][0], expected[name][2]), name
            torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(expected[name][1]), rtol=0, atol=1e-5)
    counts = with_drafts["counts"]
    # The same once more: what was written before foretells all of it, and goes on where a completion ends.
    assert counts["accepted_tokens_group"] > 0.8 * counts["draft_tokens_group"] > 0
    (_, first), (_, again) = with_drafts["found"]
    assert again < 0.7 * first


@pytest.mark.parametrize("whole", [1, 0])
def test_a_draft_counts_as_far_as_it_is_what_was_drawn(vllm_build, whole):
    """Of three requests the first has a draft of three, of which two are right, the second none, the third one."""
    from fp8core.rollout.vllm.speculation import judged

    drawn, read = torch.tensor([11, 12, 13, 14, 21, 31, 32]), torch.tensor([10, 11, 12, 19, 20, 30, 31])
    starts, is_whole = torch.tensor([0, 4, 5, 7], dtype=torch.int32), torch.tensor([1, whole, 1], dtype=torch.int32)
    found = judged(drawn, read, starts, is_whole, width=4)
    assert found.written.tolist() == [3, whole, 2]
    assert found.rejected.tolist() == [1, 0, 0]
    assert [found.drafted.tolist(), found.accepted.tolist()] == [[3, 0, 1], [2, 0, 1]]
    written = [row[:count] for row, count in zip(found.tokens.tolist(), found.written.tolist(), strict=True)]
    assert written == [[11, 12, 13], [21][:whole], [31, 32]]


@pytest.mark.parametrize("accepted", [0, DRAFT_TOKENS])
def test_drafts_are_as_long_as_they_pay_and_a_step_has_no_more_rows_than_a_full_batch(vllm_build, accepted):
    from fp8core.rollout.vllm.scheduler import DraftLengths

    lengths = DraftLengths(LARGEST_BATCH, DRAFT_TOKENS)
    assert lengths[1] > 0, "nothing is known"
    for _ in range(200):
        lengths.note(DRAFT_TOKENS, accepted)
    found = [lengths[requests] for requests in range(LARGEST_BATCH + 1)]
    assert all(requests * (1 + draft) <= LARGEST_BATCH for requests, draft in enumerate(found))
    # A row of one request costs next to nothing.
    assert found[1] == (DRAFT_TOKENS if accepted else 1)
    assert (found[6], found[LARGEST_BATCH]) == (3 if accepted else 0, 0)
    # What does not pay is tried again.
    assert sum(lengths[6] for _ in range(320)) >= (960 if accepted else 10)
