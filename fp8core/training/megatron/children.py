"""Processes that hold the other parts of Megatron trainers, one for each GPU but the first, which is this process's.

Every process makes the same calls in the same order: children get them through pipes and answer when they are done.
"""

import signal
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, multiprocessing

from fp8core.config.run import RunConfig
from fp8core.lifeline import follow_parent
from fp8core.models.architecture import Architecture
from fp8core.training.megatron import groups
from fp8core.training.megatron.build import process_device, process_trainer
from fp8core.training.megatron.trainer import MegatronTrainer
from fp8core.training.megatron.watch import Watch
from fp8core.training.trainer import NotFiniteError

Found = TypeVar("Found")
# A child that failed says so before it ends, also when this process noticed first that it was gone.
_PATIENCE_SECONDS = 10.0
STUCK_SECONDS = 60.0
"""Over Gloo a collective fails at once when a process is gone; over NCCL it does not."""


class ProcessError(RuntimeError):
    """A process of the trainer failed or ended; the message holds what it said."""


@dataclass(frozen=True)
class Start:
    """What a child builds its part from; `weights` is a file that is gone afterwards."""

    config: RunConfig
    arch: Architecture
    weights: Path

    def build(self, rank: int) -> MegatronTrainer:
        """The part of a child."""
        return process_trainer(self.config, self.arch, load_file(self.weights), process_device(rank))


class Children:
    """The processes, each at the end of a pipe. They end when this process does, however it ends."""

    def __init__(self, folder: Path, count: int, threads: int) -> None:
        """Start them and meet them; `folder` is empty and lasts as long as they do."""
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        self._answered = True
        for rank in range(1, count):
            ours, theirs = context.Pipe()
            # No daemon: a library that compiles or writes may want processes of its own, which a daemon may not have.
            process = context.Process(target=_serve, args=(folder, rank, count, threads, theirs), daemon=False)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._watch = Watch(self._processes, STUCK_SECONDS)
        try:
            self._answered = False
            self._accompany(lambda: _meet(folder, 0, count))
        except BaseException:
            self.end()
            raise

    def build(self, key: int, config: RunConfig, arch: Architecture, masters: Mapping[str, Tensor]) -> MegatronTrainer:
        """Build a trainer that starts from the given weights, under a number of its own."""
        with TemporaryDirectory(prefix="fp8-grpo-") as folder:
            start = Start(config, arch, Path(folder) / "policy.safetensors")
            if self._pipes:
                # A file: of an MoE's tensors there are more than a process may share memories.
                save_file({name: tensor.contiguous() for name, tensor in masters.items()}, start.weights)
            self._send("build", key, start)
            return self._accompany(lambda: process_trainer(config, arch, masters, process_device(0)))

    def call(self, key: int, trainer: MegatronTrainer, method: str, arguments: tuple[Any, ...]) -> Any:
        """Make a call of a trainer in all processes; returns what this one's part does.

        Raises:
            ProcessError: a child failed or ended.
            NotFiniteError: as the call has it; every process raises it, and goes on.
        """
        self._send("call", key, (method, arguments))
        return self._accompany(lambda: getattr(trainer, method)(*arguments))

    def drop(self, key: int) -> None:
        """Forget a trainer, also when a child that held it has failed."""
        with suppress(ProcessError):
            self._send("drop", key, None)
            self._gather()

    def end(self) -> None:
        """Let go of the children and wait until they are gone; a second call does nothing."""
        waiting = self._answered and all(process.is_alive() for process in self._processes)
        for pipe in self._pipes:
            pipe.close()
        # All leave together, or nobody waits for who may never come.
        (groups.leave if waiting else groups.abandon)()
        for process in self._processes:
            process.join(_PATIENCE_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()
        self._pipes, self._processes = [], []

    def _send(self, kind: str, key: int, content: object) -> None:
        self._answered = False
        try:
            for pipe in self._pipes:
                pipe.send((kind, key, content))
        except BrokenPipeError:
            self._gather()

    def _accompany(self, own: Callable[[], Found]) -> Found:
        """Do this process's part and wait for the others'."""
        try:
            with self._watch.call():
                found = own()
        except NotFiniteError:
            self._gather()
            raise
        except Exception as error:
            self._end_who_waits()
            raise ProcessError(f"process 0 of the Megatron trainer failed: {error}") from error
        self._gather()
        return found

    def _gather(self) -> None:
        for rank, (pipe, process) in enumerate(zip(self._pipes, self._processes, strict=True), start=1):
            if (problem := _answer(pipe, process)) is not None:
                raise ProcessError(f"process {rank} of the Megatron trainer failed: {problem}")
        self._answered = True

    def _end_who_waits(self) -> None:
        """This process's part failed: a child that does not answer waits for it in a collective.

        Raises:
            ProcessError: a child failed as well, and says more.
        """
        for rank, (pipe, process) in enumerate(zip(self._pipes, self._processes, strict=True), start=1):
            if not pipe.poll(_PATIENCE_SECONDS):
                process.kill()
            elif (problem := _answer(pipe, process)) is not None:
                raise ProcessError(f"process {rank} of the Megatron trainer failed: {problem}")


def _answer(pipe: Connection, process: BaseProcess) -> str | None:
    """What a child says when it is done: nothing, or why it failed."""
    try:
        problem: str | None = pipe.recv()
    except (EOFError, ConnectionResetError):
        process.join(_PATIENCE_SECONDS)
        return f"it ended with exit code {process.exitcode}"
    return problem


def _meet(folder: Path, rank: int, count: int) -> None:
    device = process_device(rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    groups.meet(folder, rank, count, device)


def _serve(folder: Path, rank: int, count: int, threads: int, pipe: Connection) -> None:
    """A child: answer None when a call is done, a text when it failed; end with the pipe."""
    # Ctrl-C reaches the whole group; what it means, the first process says.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A call in flight does not read the pipe: its collectives would wait for the dead, with the memory of a GPU.
    follow_parent()
    torch.set_num_threads(threads)
    trainers: dict[int, MegatronTrainer] = {}
    try:
        _meet(folder, rank, count)
        pipe.send(None)
        while True:
            _obey(trainers, rank, *pipe.recv())
            pipe.send(None)
    except (EOFError, BrokenPipeError):
        groups.leave()
    except Exception:
        pipe.send(traceback.format_exc())
        raise


def _obey(trainers: dict[int, MegatronTrainer], rank: int, kind: str, key: int, content: Any) -> None:
    match kind:
        case "build":
            trainers[key] = content.build(rank)
        case "drop":
            del trainers[key]
        case "call":
            method, arguments = content
            try:
                getattr(trainers[key], method)(*arguments)
            except NotFiniteError:
                # The first process raises it too.
                return
            if method == "export":
                # What torch keeps here for later would be missing to an engine that now wakes on this GPU.
                torch.cuda.empty_cache()
