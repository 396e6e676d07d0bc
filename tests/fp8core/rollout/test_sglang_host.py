"""The process between training and SGLang: its pipe, with SGLang's event loop and an engine that answers by itself."""

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import Pipe
from typing import Any

import pytest
import uvloop

from fp8core.rollout.sglang.host import FINISHED, RESULT, STOP, Host

# Together more than the buffer of any pipe.
GROUPS, TOKENS = 64, 20_000
REQUEST = {"tokens": [1, 2], "sampling": {}}


class Answering:
    """Stands for `sglang.Engine`: all requests end at the same moment, or none does before it is told to abort."""

    def __init__(self, endless: bool) -> None:
        self.loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self.tokenizer_manager = self
        self._endless, self._aborted = endless, asyncio.Event()

    async def async_generate(self, input_ids: list[list[int]], **_: Any) -> list[dict[str, Any]]:
        if self._endless:
            await self._aborted.wait()
        about = {"output_token_logprobs": [(-1.0, 7, None)] * TOKENS, "finish_reason": {"type": "length"}}
        return [{"output_ids": [7] * TOKENS, "meta_info": about} for _ in input_ids]

    def abort_request(self, abort_all: bool) -> None:
        assert abort_all
        self._aborted.set()


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def hosted(endless: bool, thread: ThreadPoolExecutor, rounds: int = 1) -> tuple[Any, "Future[list[bool]]"]:
    """The parent's end of a host's pipe, and the host's answers to so many generations, in a thread of its own."""
    ours, theirs = Pipe()
    host = Host(theirs, Answering(endless), {"model_path": "unused", "custom_weight_loader": ["unused"]})
    wanted = [(group, [REQUEST]) for group in range(GROUPS)]

    def answers() -> list[bool]:
        # A host that fails in the middle of a message would let the parent wait for its end.
        with theirs:
            return [host.answer("generate", wanted) for _ in range(rounds)]

    return ours, thread.submit(answers)


def test_a_parent_that_reads_late_gets_everything(thread: ThreadPoolExecutor) -> None:
    ours, answers = hosted(False, thread, rounds=2)
    for _ in range(2):
        assert ours.poll(60)
        time.sleep(0.3)  # The pipe fills up.
        found = [ours.recv() for _ in range(GROUPS + 1)]
        assert sorted(group for kind, group, _ in found[:-1] if kind == FINISHED) == list(range(GROUPS))
        assert all(len(output["tokens"]) == TOKENS for _, _, (output,) in found[:-1])
        assert found[-1] == (RESULT, None)
    assert answers.result(timeout=10) == [True, True]


def test_stop_ends_a_generation(thread: ThreadPoolExecutor) -> None:
    ours, answers = hosted(True, thread)
    ours.send((STOP,))
    assert ours.recv() == (RESULT, None)
    assert answers.result(timeout=10) == [True]
