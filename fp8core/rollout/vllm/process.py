"""Several engines, each in a process of its own: the child that holds a `VllmEngine`, and the parent's end of it.

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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from fp8core.config.precision import PrecisionContract
from fp8core.config.section import VllmConfig
from fp8core.errors import UserError
from fp8core.models.architecture import Architecture
from fp8core.rollout.engine import Completion, PolicyScales, Probe, PromptGroup, Sampling, SyncReport
from fp8core.rollout.vllm.requirements import VllmBuild
from fp8core.rollout.vllm.settings import WORKER
from fp8core.rollout.vllm.weights import UpdateError, share_weights, specs_of

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


Found = TypeVar("Found")


def shard_prompts(groups: Sequence[PromptGroup], engines: int) -> list[list[PromptGroup]]:
    """The groups of each engine: whole, in turn, so that as many lie on one as on another."""
    return [list(groups[first::engines]) for first in range(engines)]


class VllmReplicas:
    """Engines that hold one policy and share its prompts. They end when this process does, however it ends."""

    def __init__(
        self,
        arch: Architecture,
        contract: PrecisionContract,
        options: VllmConfig,
        max_batch: int,
        build: VllmBuild,
        worker: str = WORKER,
        routes: bool = False,
    ) -> None:
        """Start `options.gpus` engines at once, on the first GPUs; `max_batch` is of each. Arguments and errors are
        those of `VllmEngine`."""
        self._sleeps, self._asleep = options.sleep, False
        on_gpu = build.platform == "cuda"
        self._processes = [
            EngineProcess(f"vLLM on GPU {i}" if on_gpu else f"vLLM's process {i}", i if on_gpu else None)
            for i in range(options.gpus)
        ]
        self._end = weakref.finalize(self, _end, self._processes)
        try:
            self._call_all("start", arch, contract, options, max_batch, build, worker, routes)
        except BaseException:
            for process in self._processes:
                process.end(patience=0.0)
            raise

    def update(self, tensors: Mapping[str, Tensor], scales: PolicyScales, version: int) -> SyncReport:
        """As `VllmEngine.update`, in all engines at the same time.

        Raises:
            UpdateError: also when the engines do not hold the same afterwards; it names two that differ.
        """
        self._call_all("expect", specs_of(tensors), scales, version)
        if self._asleep:
            # Memory that torch caches in this process would be missing in an engine that wakes on the same GPU.
            torch.cuda.empty_cache()
        with share_weights(self._within_reach(tensors)) as shared:
            reports: list[SyncReport] = self._call_all("receive", shared, scales, version)
        self._asleep = False
        for process, report in zip(self._processes, reports, strict=True):
            if (difference := _difference(report, reports[0])) is not None:
                here, there = difference
                raise UpdateError(
                    f"policy {version}: {process.name} holds {here}, {self._processes[0].name} holds {there}"
                )
        return reports[0]

    def fingerprint(self) -> str:
        """Digest of the weights that all engines hold; raises UpdateError where they differ."""
        found: list[str] = self._call_all("fingerprint")
        return self._same("weights", found)

    def describe(self) -> dict[str, object]:
        """As `VllmEngine.describe`, which must be the same of all, and their number; raises UpdateError else."""
        found: list[dict[str, object]] = self._call_all("describe")
        same = {name: self._same(name, [each[name] for each in found]) for name in found[0]}
        return {**same, "engines": len(found)}

    def generate(self, groups: Sequence[PromptGroup], sampling: Sampling) -> Iterator[list[Completion]]:
        """As `VllmEngine.generate`; each yield is of one engine."""
        if self._sleeps:
            # Release the policy shared from this process (`VllmEngine.steps`).
            torch.cuda.empty_cache()
        shares = zip(self._processes, shard_prompts(groups, len(self._processes)), strict=True)
        sent = {process: process.send("generate", share, sampling) for process, share in shares if share}
        try:
            while sent:
                ready = wait([process.pipe for process in sent])
                for process in [process for process in sent if process.pipe in ready]:
                    answer = process.receive(sent[process])
                    if answer.kind == "finished":
                        yield answer.content
                    else:
                        del sent[process]
        finally:
            for process in sent:
                process.send("drop")

    def score(self, probes: Sequence[Probe], temperature: float) -> list[list[float]]:
        """As `VllmEngine.score`, in every engine at the same time; a row for each."""
        return [row for (row,) in self._call_all("score", probes, temperature)]

    def sleep(self) -> None:
        """As `VllmEngine.sleep`, in all engines."""
        self._call_all("sleep")
        self._asleep = self._sleeps

    def close(self) -> None:
        """End all processes; a second call does nothing."""
        self._end()

    def call_worker(self, engine: int, method: str, *arguments: Any) -> Any:
        """As `VllmEngine.call_worker`, of one engine."""
        process = self._processes[engine]
        return process.receive(process.send("call_worker", method, *arguments)).content

    def _call_all(self, method: str, *arguments: Any) -> list[Any]:
        """The answer of every engine; waits for all of them, then raises the first error."""
        sent = [(process, process.send(method, *arguments)) for process in self._processes]
        found, errors = list[Any](), list[Exception]()
        for process, number in sent:
            try:
                found.append(process.receive(number).content)
            except (EngineProcessError, UserError, UpdateError, ValueError) as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return found

    def _same(self, what: str, found: Sequence[Found]) -> Found:
        for process, value in zip(self._processes, found, strict=True):
            if value != found[0]:
                raise UpdateError(
                    f"{process.name} and {self._processes[0].name} have other {what}: {value} and {found[0]}"
                )
        return found[0]

    def _within_reach(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Tensors that every engine's GPU can read: as they are, or on the host where GPUs cannot read each other's."""
        held = {tensor.device.index for tensor in tensors.values() if tensor.is_cuda}
        pairs = [(gpu, other) for gpu in range(len(self._processes)) for other in held if gpu != other]
        if all(torch.cuda.can_device_access_peer(gpu, other) for gpu, other in pairs):
            return tensors
        return {name: tensor.cpu() for name, tensor in tensors.items()}


def _difference(report: SyncReport, other: SyncReport) -> tuple[str, str] | None:
    """The state of two engines, in words, where it differs."""
    if report.version != other.version:
        return f"version {report.version}", f"version {other.version}"
    if report.digest != other.digest:
        return f"weights {report.digest[:16]}", f"weights {other.digest[:16]}"
    for layer, (ours, theirs) in enumerate(zip(report.scales.layers, other.scales.layers, strict=True)):
        if ours != theirs:
            return f"scales {ours} of layer {layer}", f"{theirs}"
    return None


def _end(processes: Sequence[EngineProcess]) -> None:
    for process in processes:
        process.send("close")
    for process in processes:
        process.end()
