"""One of several engines in a process of its own: the child that holds a `VllmEngine`, and the parent's end of it.

The channel is a connection that pickles. Every request has a number, which its answers carry. A generation is answered
in parts, as groups finish; it ends at the engine's next step when another request comes. When the parent ends, for
whatever reason, the child's process group ends, and with it vLLM's own process.
"""

import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
import weakref
from contextlib import closing, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from fp8core.errors import UserError
from fp8core.rollout.vllm.weights import UpdateError

if TYPE_CHECKING:
    from fp8core.rollout.vllm.engine import VllmEngine

_VISIBLE = "CUDA_VISIBLE_DEVICES"
# Errors of a request; the parent raises them as what they are.
_OF_A_REQUEST = (UserError, UpdateError, ValueError)


class Request(NamedTuple):
    """A call of the engine by its method's name.

    Others are `start`, with the arguments of `VllmEngine`, `generate`, `close`, and `drop`, which has no answer.
    """

    number: int
    method: str
    arguments: tuple[Any, ...] = ()


class Answer(NamedTuple):
    """To the request with that number: newly finished completions, what a call returned, or a `Failure`."""

    number: int
    kind: Literal["finished", "returned", "failed"]
    content: Any


class Failure(NamedTuple):
    """An exception: the error itself where it is one of a request, and the traceback as text."""

    error: Exception | None
    text: str


class Channel:
    """The child's end of the connection. A thread reads it, because a new request ends a generation."""

    def __init__(self, descriptor: int) -> None:
        self._pipe: Connection[Answer, Request] = Connection(descriptor)
        self._queue, self._latest = SimpleQueue[Request](), -1
        Thread(target=self._read, daemon=True).start()

    def next(self) -> Request:
        """The next request; waits for it."""
        return self._queue.get()

    def dropped(self, request: Request) -> bool:
        """True if a later request has replaced it."""
        return request.number < self._latest

    def answer(self, request: Request, kind: Literal["finished", "returned", "failed"], content: Any) -> None:
        # `send` would pass a tensor as a descriptor, which only a related process can open.
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
        descriptor: of our end of the connection; the first request is `start`.
        gpu: the one that this process sees, counted among those that it would see; None where vLLM needs none.
    """
    if gpu is not None:
        # Before anything looks for GPUs; vLLM's process inherits it.
        os.environ[_VISIBLE] = visible_device(os.environ.get(_VISIBLE), gpu)
    channel = Channel(descriptor)
    start = channel.next()
    engine: VllmEngine | None = None
    try:
        engine = _start_engine(start.arguments)
        channel.answer(start, "returned", None)
    except Exception as error:  # noqa: BLE001 - the parent raises it
        channel.answer(start, "failed", _failure(error))
    while (request := channel.next()).method != "close":
        assert engine is not None, "the parent ends a process that has failed to start"
        try:
            channel.answer(request, "returned", _answered(engine, request, channel))
        except Exception as error:  # noqa: BLE001 - the parent raises it
            channel.answer(request, "failed", _failure(error))
    if engine is not None:
        engine.close()


def visible_device(visible: str | None, index: int) -> str:
    """The value of CUDA_VISIBLE_DEVICES that leaves the one GPU that has this index now."""
    return visible.split(",")[index].strip() if visible else str(index)


def _start_engine(arguments: tuple[Any, ...]) -> "VllmEngine":
    # vLLM reads its environment when it is imported.
    from fp8core.rollout.vllm.engine import VllmEngine

    return VllmEngine(*arguments)


def _answered(engine: "VllmEngine", request: Request, channel: Channel) -> Any:
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


_ROOT = str(Path(__file__).parents[3])
_BOOT = (
    "import sys; sys.path[:] = sys.argv[3:]; from fp8core.rollout.vllm.process import serve; "
    "serve(int(sys.argv[1]), int(sys.argv[2]) if sys.argv[2] else None)"
)
# More than vLLM's own patience with its process (`VllmEngine.close`).
_PATIENCE_SECONDS = 20.0
_POLL_SECONDS = 0.02


class EngineProcessError(RuntimeError):
    """A process of an engine failed or ended; the message names it and holds its traceback."""


class EngineProcess:
    """A fresh Python interpreter that holds one engine.

    It leads a session and process group of its own: Ctrl-C does not reach it, and vLLM's process ends with it.
    """

    def __init__(self, name: str, gpu: int | None) -> None:
        """Start it; `name` is for messages, `gpu` is that of `serve`."""
        self.name, self._number = name, -1
        ours, theirs = Pipe()
        with theirs:
            arguments = [str(theirs.fileno()), "" if gpu is None else str(gpu)]
            paths = [_ROOT, *(path for path in sys.path if path != _ROOT)]
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT, *arguments, *paths],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.pipe: Connection[Request, Answer] = ours
        _held.add(self)

    def send(self, method: str, *arguments: Any) -> int:
        """Send a request in place of the one before; returns its number."""
        self._number += 1
        # The next read reports a process that has ended.
        with suppress(BrokenPipeError, ConnectionResetError):
            self.pipe.send(Request(self._number, method, arguments))
        return self._number

    def receive(self, number: int) -> Answer:
        """The next answer to the request with that number; waits for it.

        Raises:
            EngineProcessError: the process failed, or has ended.
            UserError, UpdateError, ValueError: as the engine raised it.
        """
        assert number == self._number, "another request has replaced it"
        while True:
            try:
                answer = self.pipe.recv()
            # An end within an answer raises another error than one between answers.
            except (EOFError, OSError):
                raise EngineProcessError(f"{self.name} ended with exit code {self.end()}") from None
            if answer.kind == "failed" and answer.number == number:
                raise self._error(answer.content)
            if answer.number == number:
                return answer

    def end(self, patience: float = _PATIENCE_SECONDS) -> int:
        """Wait so many seconds for its end, then kill it, and vLLM's process with it; returns its exit code."""
        if self._process.returncode is None:
            deadline = time.monotonic() + patience
            while not self._is_over() and time.monotonic() < deadline:
                self._discard_answers(_POLL_SECONDS)
            # Until it is reaped, no other process gets its number.
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()

    def _is_over(self) -> bool:
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _discard_answers(self, seconds: float) -> None:
        """A child that blocks in a send would not read the request to close."""
        try:
            while self.pipe.poll(seconds):
                self.pipe.recv_bytes()
        except (EOFError, OSError):
            time.sleep(seconds)

    def _error(self, failure: Failure) -> Exception:
        if failure.error is None:
            last = failure.text.strip().rpartition("\n")[2]
            return EngineProcessError(f"{self.name} failed: {last}\n{failure.text}")
        if isinstance(failure.error, UserError):
            return failure.error
        return type(failure.error)(f"{self.name}: {failure.error}")


_held: weakref.WeakSet[EngineProcess] = weakref.WeakSet()


def _close_copies() -> None:
    for process in list(_held):
        process.pipe.close()


# A connection ends when its last copy is closed: a forked child must not keep it open after this process ends.
os.register_at_fork(after_in_child=_close_copies)
