"""The process between training and SGLang: its pipe, with SGLang's event loop and an engine that answers by itself."""

import asyncio
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import Pipe
from typing import Any

import answering_engine
import pytest
import uvloop

from fp8core.config.precision import PrecisionContract
from fp8core.errors import EngineLost
from fp8core.models.hub import HUB_ARCHITECTURES
from fp8core.rollout.engine import Completion, PromptGroup, Sampling, Session
from fp8core.rollout.resident import ResidentEngine
from fp8core.rollout.sglang.engine import HostPipe, SglangEngine
from fp8core.rollout.sglang.host import Host, serve

# Together more than the buffer of any pipe.
TOKENS = 20_000
SETTINGS = {"model_path": "unused", "custom_weight_loader": ["unused"], "max_running_requests": 9}
# Python and torch start twice as slowly beside other tests.
STARTED = 120.0
ENDLESS = 99
ARCH = HUB_ARCHITECTURES["Qwen/Qwen3-8B-Base"]
StartHost = Callable[[Callable[..., Any]], tuple[HostPipe, Any]]
pytestmark = pytest.mark.timeout(300)


class Counting:
    """Stands for `sglang.Engine`: tokens count on from the length of what was read; ENDLESS never ends by itself.
    With `raises`, a request that is aborted before it reached SGLang ends with an error."""

    policy_processor = ""

    def __init__(self, raises: bool = False) -> None:
        self.loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self.tokenizer_manager = self
        self.raises, self.aborts = raises, 0
        self._aborted, self.now, self.most = asyncio.Event(), 0, 0

    async def async_generate(self, input_ids: list[int], sampling_params: dict[str, Any], **_: Any) -> dict[str, Any]:
        aborts = self.aborts
        self.now += 1
        self.most = max(self.most, self.now)
        # Requests reach it after a moment, and what was aborted until then does not concern them.
        await asyncio.sleep(0.1 if self.raises else 0.01)
        if self.raises and self.aborts > aborts:
            raise ValueError("aborted")
        self._aborted.clear()
        if ENDLESS in input_ids:
            await self._aborted.wait()
        self.now -= 1
        tokens = list(range(len(input_ids), len(input_ids) + sampling_params["max_new_tokens"]))
        about = {"output_token_logprobs": [(-1.0, token, None) for token in tokens]}
        return {"output_ids": tokens, "meta_info": about | {"finish_reason": {"type": "length"}}}

    def abort_request(self, abort_all: bool) -> None:
        assert abort_all
        self.aborts += 1
        self._aborted.set()


@contextmanager
def hosted(engine: Counting) -> Iterator[HostPipe]:
    """The pipe to a host of this engine, which answers in a thread until it is closed."""
    ours, theirs = Pipe()

    def answer() -> None:
        with theirs:
            host = Host(theirs, engine, SETTINGS)
            while host.answer(*theirs.recv()):
                pass

    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(answer)
        pipe = HostPipe(ours)
        try:
            yield pipe
        finally:
            pipe.close(time.monotonic() + 20)
        ended.result(timeout=10)


def session_of(pipe: HostPipe, tokens: int) -> Session:
    """Of an engine that holds a policy."""
    engine = SglangEngine.__new__(SglangEngine)
    ResidentEngine.__init__(engine, ARCH, PrecisionContract(), lowest=0.0, sleeps=False, routes=False)
    engine._host, engine._complete = pipe, True
    return engine.open_session(Sampling(1.0, tokens, frozenset()))


def group(number: int, *prompt: int) -> PromptGroup:
    return PromptGroup(number, f"{number}", prompt, (0, 1), (7, 8))


def finished(session: Session) -> list[Completion]:
    found = list[Completion]()
    while session.busy:
        found += session.step()
    session.close()
    return found


def test_a_session_takes_requests_while_others_run() -> None:
    """Of several turns: the second goes on where the first and an observation ended."""
    with hosted(Counting()) as pipe:
        session = session_of(pipe, 6)
        session.add([group(0, 1, 2)])
        found = session.step()
        session.add([replace(group(1, 4), prefix_tokens=((5, 6), (5, 6, 6)), max_tokens=(2, 99))])
        found += finished(session)
    assert {(done.group, done.sample): (done.tokens, done.finish) for done in found} == {
        (0, 0): ([2, 3, 4, 5, 6, 7], "length"),
        (0, 1): ([2, 3, 4, 5, 6, 7], "length"),
        (1, 0): ([3, 4], "open"),
        (1, 1): ([4, 5, 6], "length"),
    }


def test_a_session_that_is_left_drops_what_runs_and_what_waits() -> None:
    with hosted(Counting()) as pipe:
        session = session_of(pipe, 6)
        session.add([group(0, ENDLESS), group(1, 1), *(group(2 + more, ENDLESS) for more in range(6))])
        assert all(done.group == 1 for done in session.step())
        session.close()
        assert not session.busy
        again = session_of(pipe, 2)
        again.add([group(3, 1)])
        assert [(done.group, done.tokens) for done in finished(again)] == [(3, [1, 2])] * 2


def test_a_session_takes_long_prompts_while_its_outputs_are_unread() -> None:
    """Either end has more to send than a pipe holds."""
    with hosted(Counting()) as pipe:
        session = session_of(pipe, TOKENS)
        session.add([group(number, 1) for number in range(8)])
        assert pipe.comes(30)
        time.sleep(0.3)  # The pipe fills up.
        session.add([group(8, *[5] * 1_000_000)])
        assert sorted(done.group for done in finished(session)) == sorted([*range(9)] * 2)


def test_the_end_of_a_host_is_raised_by_whatever_is_asked_of_it() -> None:
    ours, theirs = Pipe()
    pipe = HostPipe(ours)
    session = session_of(pipe, 6)
    session.add([group(0, 1)])
    theirs.close()
    with pytest.raises(EngineLost, match="SGLang's host ended"):
        session.step()
    session.close()

    def send_on() -> None:
        while True:
            pipe.send("add", [])

    with pytest.raises(EngineLost, match="SGLang's host ended"):
        send_on()


@pytest.fixture
def start_host() -> Iterator[StartHost]:
    """Starts a host in a process of its own, whose engine a function of `answering_engine` makes."""
    context, hosts = multiprocessing.get_context("spawn"), list[Any]()

    def start(engine: Callable[..., Any]) -> tuple[HostPipe, Any]:
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, SETTINGS, engine), daemon=False)
        process.start()
        hosts.append(process)
        theirs.close()
        pipe = HostPipe(ours)
        assert pipe.comes(STARTED), "it neither started nor ended"
        return pipe, process

    yield start
    for process in hosts:
        process.kill()
        process.join()


def test_the_end_of_a_process_of_sglang_in_the_middle_of_a_call_is_raised(start_host: StartHost) -> None:
    pipe, process = start_host(answering_engine.start)
    pipe.answer()
    pipe.send("release", [])
    assert pipe.comes(30), "the call neither returns nor ends"
    with pytest.raises(EngineLost, match="SGLang's host ended"):
        pipe.receive()
    process.join(10)
    assert process.exitcode == -signal.SIGKILL
