"""What a child process of several engines does: hold one `VllmEngine`, and answer what it is asked.

The channel is a connection that pickles. Every request has a number, which its answers carry. What is generated is
answered in parts, as groups finish; a generation ends at the next step of the engine when something else is asked. When
the parent is gone, however it went, the process group ends, and with it vLLM's own process.
"""

import os
import pickle
import signal
import traceback
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from fp8core.config.precision import PrecisionContract
from fp8core.config.vllm import VllmConfig
from fp8core.errors import UserError
from fp8core.models.architecture import Architecture
from fp8core.rollout.vllm_layout import UpdateError
from fp8core.rollout.vllm_versions import VllmBuild

if TYPE_CHECKING:
    from fp8core.rollout.vllm import VllmEngine

_VISIBLE = "CUDA_VISIBLE_DEVICES"
# Errors of a request; the parent raises them as what they are.
_OF_A_REQUEST = (UserError, UpdateError, ValueError)


@dataclass(frozen=True)
class Start:
    """What an engine is built from: the arguments of `VllmEngine`."""

    arch: Architecture
    contract: PrecisionContract
    options: VllmConfig
    max_batch: int
    build: VllmBuild
    worker: str
    routes: bool

    def engine(self) -> "VllmEngine":
        """Start it."""
        # vLLM reads its environment when it is imported.
        from fp8core.rollout.vllm import VllmEngine

        return VllmEngine(self.arch, self.contract, self.options, self.max_batch, self.build, self.worker, self.routes)


class Request(NamedTuple):
    """A call of the engine by its method's name; or `start`, `generate`, `close`, or `drop`, which has no answer."""

    number: int
    method: str
    arguments: tuple[Any, ...] = ()


class Answer(NamedTuple):
    """To the request with that number: completions that have just finished, what a call returned, or a `Failure`."""

    number: int
    kind: Literal["finished", "returned", "failed"]
    content: Any


class Failure(NamedTuple):
    """What was raised: the error itself where it is one of a request, and the traceback as text."""

    error: Exception | None
    text: str


class Channel:
    """Our end of the connection. A thread reads it, since a generation must notice that something else is asked."""

    def __init__(self, descriptor: int) -> None:
        self._pipe: Connection[Answer, Request] = Connection(descriptor)
        self._queue, self._latest = SimpleQueue[Request](), -1
        Thread(target=self._read, daemon=True).start()

    def next(self) -> Request:
        """The next request, when it comes."""
        return self._queue.get()

    def dropped(self, request: Request) -> bool:
        """Whether nobody waits for its answers any more."""
        return request.number < self._latest

    def answer(self, request: Request, kind: Literal["finished", "returned", "failed"], content: Any) -> None:
        """Send an answer."""
        # `send` would pass a tensor as a descriptor that only a relative of this process may ask for.
        self._pipe.send_bytes(pickle.dumps(Answer(request.number, kind, content)))

    def _read(self) -> None:
        try:
            while True:
                request = self._pipe.recv()
                self._latest = request.number
                if request.method != "drop":
                    self._queue.put(request)
        finally:
            os.killpg(0, signal.SIGKILL)


def serve(descriptor: int, gpu: int | None) -> None:
    """Hold an engine until the parent closes it.

    Args:
        descriptor: of our end of the connection; the first request has a `Start`.
        gpu: the one that this process sees, counted among those that it would see; None where vLLM needs none.
    """
    if gpu is not None:
        # Before anything looks for GPUs; vLLM's process inherits it.
        os.environ[_VISIBLE] = visible_device(os.environ.get(_VISIBLE), gpu)
    channel = Channel(descriptor)
    start = channel.next()
    engine: VllmEngine | None = None
    try:
        engine = start.arguments[0].engine()
        channel.answer(start, "returned", None)
    except Exception as error:  # noqa: BLE001 - the parent raises it
        channel.answer(start, "failed", _failure(error))
    while (request := channel.next()).method != "close":
        assert engine is not None, "the parent ends a process that has failed to start"
        try:
            channel.answer(request, "returned", _obey(engine, request, channel))
        except Exception as error:  # noqa: BLE001 - the parent raises it
            channel.answer(request, "failed", _failure(error))
    if engine is not None:
        engine.close()


def visible_device(visible: str | None, index: int) -> str:
    """The value of CUDA_VISIBLE_DEVICES that leaves the one GPU that has this index now."""
    return visible.split(",")[index].strip() if visible else str(index)


def _obey(engine: "VllmEngine", request: Request, channel: Channel) -> Any:
    if request.method != "generate":
        return getattr(engine, request.method)(*request.arguments)
    with closing(engine.steps(*request.arguments)) as steps:
        for finished in steps:
            if finished:
                channel.answer(request, "finished", finished)
            if channel.dropped(request):
                break
    return None


def _failure(error: Exception) -> Failure:
    return Failure(error if type(error) in _OF_A_REQUEST else None, traceback.format_exc())
