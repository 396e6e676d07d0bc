"""How prompts are sharded, which GPU an engine is given, and the channel to its process; the rest is in tests/vllm."""

import subprocess
import sys
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch

from fp8core.rollout.engine import PromptGroup
from fp8core.rollout.vllm.process import shard_prompts, visible_device


def groups_of(count):
    return [PromptGroup(i, f"prompt-{i}", (i,), (0, 1), (2 * i, 2 * i + 1)) for i in range(count)]


@pytest.mark.parametrize(("groups", "engines"), [(0, 2), (1, 3), (7, 2), (8, 4), (5, 8), (64, 8)])
def test_every_group_goes_to_one_engine_and_none_has_many_more_than_another(groups, engines):
    asked = groups_of(groups)
    shares = shard_prompts(asked, engines)
    assert len(shares) == engines
    assert sorted(group.group for share in shares for group in share) == list(range(groups))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert shard_prompts(asked, engines) == shares, "asked again, each engine gets the same"


def test_an_engine_keeps_the_order_of_its_prompts():
    assert [[group.group for group in share] for share in shard_prompts(groups_of(5), 2)] == [[0, 2, 4], [1, 3]]


@pytest.mark.parametrize(
    ("visible", "index", "found"),
    [
        (None, 3, "3"),
        ("", 1, "1"),
        ("4,5,6,7", 0, "4"),
        ("4, 5,6,7", 1, "5"),
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6,GPU-1", 0, "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"),
    ],
)
def test_an_engine_sees_one_of_the_gpus_that_are_visible_here(visible, index, found):
    assert visible_device(visible, index) == found


_ROOT = Path(__file__).parents[3]
_ANSWERS = """
import sys, time
import torch
from fp8core.rollout.engine import Completion
from fp8core.rollout.vllm.process import Channel, Request
channel = Channel(int(sys.argv[1]))
experts = torch.arange(12, dtype=torch.int16).view(3, 2, 2)
channel.answer(Request(7, "generate"), "finished", [Completion(1, 2, [3, 4], [-0.5, -1.0], "stop", experts)])
time.sleep(60)
"""


def test_experts_leave_the_process_of_an_engine():
    """It is no child that `multiprocessing` made, and torch would share the memory of a tensor with such only."""
    ours, theirs = Pipe()
    command = [sys.executable, "-c", _ANSWERS, str(theirs.fileno())]
    with subprocess.Popen(command, cwd=_ROOT, pass_fds=[theirs.fileno()], start_new_session=True) as child:
        theirs.close()
        number, kind, (done,) = ours.recv()
        assert (number, kind, done.tokens, done.finish) == (7, "finished", [3, 4], "stop")
        assert done.experts.dtype == torch.int16
        assert done.experts.tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10, 11]]]
        ours.close()
        assert child.wait(20) != 0, "without its parent it ends"
