"""The channel of an engine's process, of which nothing needs vLLM."""

import subprocess
import sys
from multiprocessing import Pipe
from pathlib import Path

import torch

_ROOT = Path(__file__).parents[3]
_ANSWERS = """
import sys, time
import torch
from fp8core.rollout.engine import Completion
from fp8core.rollout.vllm_child import Channel, Request
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
