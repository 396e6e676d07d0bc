"""The process between training and SGLang: its pipe, with SGLang's event loop and an engine that answers by itself."""

import asyncio
import base64
import struct
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import Pipe
from typing import Any

import pytest
import uvloop

from fp8core.errors import EngineLost
from fp8core.models.architecture import Experts
from fp8core.models.hub import PUBLISHED
from fp8core.rollout.engine import PromptGroup, Sampling, Session
from fp8core.rollout.sglang.engine import HostPipe, SglangSession
from fp8core.rollout.sglang.host import CLOSE, FINISHED, RESULT, STOP, Host

# Together more than the buffer of any pipe.
GROUPS, TOKENS = 64, 20_000
SETTINGS = {"model_path": "unused", "custom_weight_loader": ["unused"], "max_running_requests": 65}
REQUEST = {"tokens": [1, 2], "sampling": {}}
# Two layers, of whose four experts a token goes to two.
EXPERTS = Experts(count=4, per_token=2, intermediate_size=128, normalise_top_k=True, sparse_step=1, dense_layers=())
ARCH = replace(PUBLISHED["Qwen/Qwen3-30B-A3B"], num_layers=2, experts=EXPERTS)


class Answering:
    """Stands for `sglang.Engine`: all requests end at the same moment, or none does before it is told to abort."""

    def __init__(self, endless: bool) -> None:
        self.loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self.tokenizer_manager = self
        self._endless, self._aborted, self.entered = endless, asyncio.Event(), 0

    async def async_generate(self, input_ids: list[int], **_: Any) -> dict[str, Any]:
        self.entered += 1
        if self._endless:
            await self._aborted.wait()
        about = {"output_token_logprobs": [(-1.0, 7, None)] * TOKENS, "finish_reason": {"type": "length"}}
        return {"output_ids": [7] * TOKENS, "meta_info": about}

    def abort_request(self, abort_all: bool) -> None:
        assert abort_all
        self._aborted.set()


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


class Late(Answering):
    """Requests reach it after a moment, and what was aborted until then does not concern them."""

    async def async_generate(self, input_ids: list[int], **settings: Any) -> dict[str, Any]:
        await asyncio.sleep(0.1)
        self._aborted.clear()
        return await super().async_generate(input_ids, **settings)


def hosted(
    engine: Answering, thread: ThreadPoolExecutor, rounds: int = 1, places: int = 64
) -> tuple[Any, "Future[list[bool]]"]:
    """The parent's end of a host's pipe, and the host's answers to so many generations, in a thread of its own."""
    ours, theirs = Pipe()
    host = Host(theirs, engine, {**SETTINGS, "max_running_requests": places + 1})
    wanted = [(group, [REQUEST]) for group in range(GROUPS)]

    def answers() -> list[bool]:
        # A host that fails in the middle of a message would let the parent wait for its end.
        with theirs:
            return [host.answer("generate", wanted) for _ in range(rounds)]

    return ours, thread.submit(answers)


def test_a_parent_that_reads_late_gets_everything(thread: ThreadPoolExecutor) -> None:
    ours, answers = hosted(Answering(False), thread, rounds=2)
    for _ in range(2):
        assert ours.poll(60)
        time.sleep(0.3)  # The pipe fills up.
        found = [ours.recv() for _ in range(GROUPS + 1)]
        assert sorted(group for kind, group, _ in found[:-1] if kind == FINISHED) == list(range(GROUPS))
        assert all(len(output["tokens"]) == TOKENS for _, _, (output,) in found[:-1])
        assert found[-1] == (RESULT, None)
    assert answers.result(timeout=10) == [True, True]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", [Answering, Late])
def test_stop_ends_a_generation(kind: type[Answering], thread: ThreadPoolExecutor) -> None:
    engine = kind(True)
    ours, answers = hosted(engine, thread, places=8)
    ours.send((STOP,))
    assert ours.poll(20)
    assert ours.recv() == (RESULT, None)
    assert answers.result(timeout=10) == [True]
    # Those that waited for a place have not begun.
    assert engine.entered <= 8


class Crowded(Answering):
    """Remembers how many requests were in it at once."""

    now = most = 0

    async def async_generate(self, input_ids: list[int], **settings: Any) -> dict[str, Any]:
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.001)
        self.now -= 1
        return await super().async_generate(input_ids, **settings)


def test_no_more_requests_run_than_the_batch_has_places(thread: ThreadPoolExecutor) -> None:
    """SGLang has one place more: it counts a prompt that it cuts twice."""
    ours, theirs = Pipe()
    engine = Crowded(False)
    answers = thread.submit(answer_all, Host(theirs, engine, {**SETTINGS, "max_running_requests": 9}), theirs)
    pipe = HostPipe(ours)
    session = session_of(pipe, Sampling(1.0, TOKENS, frozenset()))
    session.add([group(number, 1) for number in range(12)])
    found = []
    while session.busy:
        found += session.step()
    session.close()
    pipe.close(time.monotonic() + 20)
    answers.result(timeout=10)
    assert len(found) == 24
    assert engine.most == 8


def test_close_ends_a_generation_as_the_end_of_the_parent_does(thread: ThreadPoolExecutor) -> None:
    ours, answers = hosted(Answering(True), thread, places=8)
    ours.send((CLOSE,))
    with pytest.raises(EOFError, match="closed while requests were running"):
        answers.result(timeout=10)


ENDLESS = 99


class Counting(Answering):
    """Tokens count on from the length of what was read, one a millisecond; a prompt of ENDLESS never ends by itself."""

    async def async_generate(self, input_ids: list[int], sampling_params: dict[str, Any], **_: Any) -> dict[str, Any]:
        if ENDLESS in input_ids:
            await self._aborted.wait()
        tokens = list(range(len(input_ids), len(input_ids) + sampling_params["max_new_tokens"]))
        await asyncio.sleep(len(tokens) / 1000)
        about = {"output_token_logprobs": [(-1.0, token, None) for token in tokens]}
        return {"output_ids": tokens, "meta_info": about | {"finish_reason": {"type": "length"}}}


class Routed(Answering):
    """Each position of each layer goes to experts 3 and 1, by descending weight; only where it is asked."""

    async def async_generate(
        self, input_ids: list[int], return_routed_experts: bool = False, **_: Any
    ) -> dict[str, Any]:
        about: dict[str, Any] = {"output_token_logprobs": [(-1.0, 7, None)] * 2, "finish_reason": {"type": "length"}}
        if return_routed_experts:
            positions = len(input_ids) + 1
            chosen = struct.pack(f"{positions * 4}i", *[3, 1] * (positions * 2))
            about["routed_experts"] = base64.b64encode(chosen).decode()
        return {"output_ids": [7, 7], "meta_info": about}


def session_of(pipe: HostPipe, sampling: Sampling) -> SglangSession:
    return SglangSession(pipe, sampling, lambda groups, sampling: None, ARCH)


def group(number: int, *prompt: int) -> PromptGroup:
    return PromptGroup(number, f"{number}", prompt, (0, 1), (7, 8))


def answer_all(host: Host, pipe: Any) -> None:
    """Answer until CLOSE is asked for."""
    with pipe:
        while host.answer(*pipe.recv()):
            pass


@pytest.fixture
def opened(thread: ThreadPoolExecutor) -> Iterator[tuple[HostPipe, Session]]:
    """A session, and the pipe to its host, which takes a second one afterwards."""
    ours, theirs = Pipe()
    host = Host(theirs, Counting(False), SETTINGS)

    thread.submit(answer_all, host, theirs)
    pipe = HostPipe(ours)
    yield pipe, session_of(pipe, Sampling(1.0, 6, frozenset()))
    pipe.close(time.monotonic() + 20)


def test_a_session_takes_requests_while_others_run(opened: tuple[HostPipe, Session]) -> None:
    """Of several turns: the second goes on where the first and an observation ended."""
    _, session = opened
    session.add([group(0, 1, 2)])
    found, late = [], [replace(group(1, 4), begun=((5, 6), (5, 6, 6)), room=(2, 99)), group(2, 3, 3, 3)]
    while session.busy or late:
        found += session.step()
        if late:
            session.add([late.pop()])
    session.close()
    assert {(done.group, done.sample): (done.tokens, done.finish) for done in found} == {
        (0, 0): ([2, 3, 4, 5, 6, 7], "length"),
        (0, 1): ([2, 3, 4, 5, 6, 7], "length"),
        (1, 0): ([3, 4], "open"),
        (1, 1): ([4, 5, 6], "length"),
        (2, 0): ([3, 4, 5, 6, 7, 8], "length"),
        (2, 1): ([3, 4, 5, 6, 7, 8], "length"),
    }


def test_a_session_that_is_left_drops_what_runs(opened: tuple[HostPipe, Session]) -> None:
    pipe, session = opened
    session.add([group(0, ENDLESS), group(1, 1)])
    assert all(done.group == 1 for done in session.step())
    session.close()
    assert not session.busy
    again = session_of(pipe, Sampling(1.0, 2, frozenset()))
    again.add([group(3, 1)])
    found = []
    while again.busy:
        found += again.step()
    again.close()
    assert [(done.group, done.tokens) for done in found] == [(3, [1, 2])] * 2


@pytest.mark.timeout(60)
def test_a_session_takes_long_prompts_while_its_outputs_are_unread(thread: ThreadPoolExecutor) -> None:
    """Either end has more to send than a pipe holds."""
    ours, theirs = Pipe()
    host = Host(theirs, Answering(False), SETTINGS)
    with ours:
        ended = thread.submit(answer_all, host, theirs)
        pipe = HostPipe(ours)
        session = session_of(pipe, Sampling(1.0, TOKENS, frozenset()))
        session.add([group(number, 1) for number in range(8)])
        assert pipe.comes(30)
        time.sleep(0.3)  # The pipe fills up.
        session.add([group(8, *[5] * 1_000_000)])
        found = []
        while session.busy:
            found += session.step()
        session.close()
        pipe.close(time.monotonic() + 20)
        ended.result(timeout=10)
    assert sorted(done.group for done in found) == sorted([*range(9)] * 2)


def test_requests_of_a_host_that_has_ended_are_refused() -> None:
    ours, theirs = Pipe()
    pipe = HostPipe(ours)
    theirs.close()

    def send_on() -> None:
        while True:
            pipe.send("add", [])

    with pytest.raises(EngineLost, match="SGLang's host ended"):
        send_on()
    with pytest.raises(EngineLost, match="SGLang's host ended"):
        pipe.call("resolved")


@pytest.mark.parametrize("wanted", [True, False])
def test_experts_come_with_completions_that_ask_for_them(thread: ThreadPoolExecutor, wanted: bool) -> None:
    ours, theirs = Pipe()
    thread.submit(answer_all, Host(theirs, Routed(endless=False), SETTINGS), theirs)
    pipe = HostPipe(ours)
    session = session_of(pipe, Sampling(1.0, 3, frozenset(), report_experts=wanted))
    session.add([group(0, 5, 6, 8), replace(group(1, 5, 6), begun=((8,), (8,)))])
    found = []
    while session.busy:
        found += session.step()
    session.close()
    pipe.close(time.monotonic() + 20)
    for done in found:
        assert (done.experts is not None) == wanted
        # Three of what was there, and the first of two that were written.
        assert done.experts is None or done.experts.tolist() == [[[1, 3]] * 2] * 4


def test_a_session_whose_host_ends_says_so_and_closes(thread: ThreadPoolExecutor) -> None:
    ours, theirs = Pipe()
    session = session_of(HostPipe(ours), Sampling(1.0, 6, frozenset()))
    session.add([group(0, 1)])
    theirs.close()
    with pytest.raises(EngineLost, match="SGLang's host ended"):
        session.step()
    session.close()
