"""SGLang's host as a process that ends with those of its engine, which a stand-in has."""

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import answering_engine
import pytest

from fp8core.errors import EngineLost
from fp8core.rollout.sglang.engine import HostPipe
from fp8core.rollout.sglang.host import ADD, serve

# Python and torch start twice as slowly beside other tests.
STARTED = 120.0
StartHost = Callable[[Callable[..., Any]], tuple[HostPipe, Any]]
ARGUMENTS = {"model_path": "unused", "custom_weight_loader": ["unused"], "max_running_requests": 9}
pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def start_host() -> Iterator[StartHost]:
    """Starts a host whose engine a function of `answering_engine` makes."""
    context, hosts = multiprocessing.get_context("spawn"), list[Any]()

    def start(engine: Callable[..., Any]) -> tuple[HostPipe, Any]:
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, ARGUMENTS, engine), daemon=False)
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


@pytest.mark.parametrize(("method", "code"), [("release", -signal.SIGKILL), ("resume", 3)])
def test_an_end_in_the_middle_of_a_call_is_raised(start_host: StartHost, method: str, code: int) -> None:
    """The end of a process of SGLang, which its engine waits for, and that of the host itself."""
    pipe, process = start_host(answering_engine.start)
    pipe.answer()
    pipe.send(method, [])
    assert pipe.comes(30), "the call neither returns nor ends"
    with pytest.raises(EngineLost, match="SGLang's host ended"):
        pipe.receive()
    process.join(10)
    assert process.exitcode == code


def test_a_start_that_fails_leaves_no_process(start_host: StartHost, capfd: pytest.CaptureFixture[str]) -> None:
    pipe, process = start_host(answering_engine.fail)
    with pytest.raises(EngineLost, match="SGLang's host ended"):
        pipe.answer()
    process.join(10)
    assert process.exitcode == 1
    assert "no memory is left for the cache" in capfd.readouterr().err


@pytest.mark.parametrize("kind", ["generation", "session"])
def test_a_close_while_requests_run_is_orderly(start_host: StartHost, kind: str) -> None:
    """The host is blocked in sending outputs, and the first message that it reads is the end."""
    pipe, process = start_host(answering_engine.start)
    pipe.answer()
    wanted = [(number, [{"tokens": [1, 2], "sampling": {}}]) for number in range(8)]
    if kind == "session":
        pipe.send("session")
        pipe.send(ADD, wanted)
        assert pipe.comes(30)
    else:
        running = pipe.outputs(wanted)
        next(running)
    pipe.close(time.monotonic() + 20)
    process.join(5)
    assert process.exitcode == 0
    if kind == "generation":
        running.close()
    with pytest.raises(EngineLost, match="SGLang's host ended"):
        pipe.call("resolved")
