"""Megatron trainers on `training.megatron.gpus` GPUs: in this process, and in a child for each GPU but the first.

Every process makes the same calls in the same order: children receive them through pipes and reply when they are done.
A process is part of one grid at a time, which all of its trainers share (the policy and the frozen reference).
"""

import atexit
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, multiprocessing

from fp8core.config.run import RunConfig
from fp8core.end_with_parent import follow_parent
from fp8core.models.architecture import Architecture
from fp8core.models.weights import ShippedTensors
from fp8core.numerics.kv_scales import KvStatistics, LayerScales
from fp8core.rl.batch import RolloutBatch, TokenBatch
from fp8core.training.megatron import parallel
from fp8core.training.megatron.trainer import MegatronTrainer, process_device, process_trainer
from fp8core.training.trainer import NotFiniteError, ScoredBatch, TrainReport


class Watch:
    """Ends this process when it waits in a collective for a child that has ended.

    Over NCCL such a wait lasts until its timeout of half an hour, with the GPU busy. No exception or signal handler of
    Python reaches it. SIGKILL loses nothing that is finished.
    """

    def __init__(self, processes: Sequence[BaseProcess], patience: float) -> None:
        """Watch them; `patience` is the seconds that a call may go on without one of them."""
        self._processes, self._patience = processes, patience
        self._numbers, self._call = count(1), 0
        if processes:
            Thread(target=self._end_a_stuck_call, name="watch of children", daemon=True).start()

    @contextmanager
    def call(self) -> Iterator[None]:
        """A call that all processes make together."""
        self._call = next(self._numbers)
        try:
            yield
        finally:
            self._call = 0

    def _end_a_stuck_call(self) -> None:
        wait([process.sentinel for process in self._processes])
        interrupted = self._call
        time.sleep(self._patience)
        if interrupted and self._call == interrupted:
            codes = [process.exitcode for process in self._processes if not process.is_alive()]
            said = f"a process of the Megatron trainer ended (exit code {codes}), and this one waits for it in vain"
            print(f"{said}: it ends too", file=sys.stderr, flush=True)  # noqa: T201
            os.kill(os.getpid(), signal.SIGKILL)


Found = TypeVar("Found")
# A child that fails sends the reason before it ends.
_PATIENCE_SECONDS = 10.0
STUCK_SECONDS = 60.0
"""Over Gloo a collective fails at once when a process is gone; over NCCL it does not."""


class ProcessError(RuntimeError):
    """A process of the trainer failed or ended; the message holds its traceback or exit code."""


@dataclass(frozen=True)
class Start:
    """The input that a child builds its part from; `weights` is a file that is gone afterwards."""

    config: RunConfig
    arch: Architecture
    weights: Path

    def build(self, rank: int) -> MegatronTrainer:
        """The part of a child."""
        return process_trainer(self.config, self.arch, load_file(self.weights), process_device(rank))


class Children:
    """The processes, each at the end of a pipe. They end when this process does, however it ends."""

    def __init__(self, folder: Path, count: int, threads: int) -> None:
        """Start them and make the process groups; `folder` is empty and lasts as long as they do."""
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        self._answered = True
        for rank in range(1, count):
            ours, theirs = context.Pipe()
            # No daemon: a library that compiles or writes may start processes, which a daemon may not.
            process = context.Process(target=_serve, args=(folder, rank, count, threads, theirs), daemon=False)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._watch = Watch(self._processes, STUCK_SECONDS)
        try:
            self._answered = False
            self._accompany(lambda: _init_groups(folder, 0, count))
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
            NotFiniteError: from the call; every process raises it and continues.
        """
        self._send("call", key, (method, arguments))
        return self._accompany(lambda: getattr(trainer, method)(*arguments))

    def drop(self, key: int) -> None:
        """Drop a trainer, also when a child that held it has failed."""
        with suppress(ProcessError):
            self._send("drop", key, None)
            self._gather()

    def end(self) -> None:
        """Close the pipes and wait until the children have ended; a second call does nothing."""
        waiting = self._answered and all(process.is_alive() for process in self._processes)
        for pipe in self._pipes:
            pipe.close()
        # Without all processes a collective shutdown would not end.
        (parallel.destroy if waiting else parallel.abort)()
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
        """Run this process's part, then wait for the others."""
        try:
            with self._watch.call():
                found = own()
        except NotFiniteError:
            self._gather()
            raise
        except Exception as error:
            self._end_waiting()
            raise ProcessError(f"process 0 of the Megatron trainer failed: {error}") from error
        self._gather()
        return found

    def _gather(self) -> None:
        for rank, (pipe, process) in enumerate(zip(self._pipes, self._processes, strict=True), start=1):
            if (problem := _answer(pipe, process)) is not None:
                raise ProcessError(f"process {rank} of the Megatron trainer failed: {problem}")
        self._answered = True

    def _end_waiting(self) -> None:
        """This process's part failed: a child that does not answer waits for it in a collective.

        Raises:
            ProcessError: a child failed as well; its reason is more precise.
        """
        for rank, (pipe, process) in enumerate(zip(self._pipes, self._processes, strict=True), start=1):
            if not pipe.poll(_PATIENCE_SECONDS):
                process.kill()
            elif (problem := _answer(pipe, process)) is not None:
                raise ProcessError(f"process {rank} of the Megatron trainer failed: {problem}")


def _answer(pipe: Connection, process: BaseProcess) -> str | None:
    """The reply of a child: None, or why it failed."""
    try:
        problem: str | None = pipe.recv()
    except (EOFError, ConnectionResetError):
        process.join(_PATIENCE_SECONDS)
        return f"it ended with exit code {process.exitcode}"
    return problem


def _init_groups(folder: Path, rank: int, count: int) -> None:
    device = process_device(rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    parallel.init(folder, rank, count, device)


def _serve(folder: Path, rank: int, count: int, threads: int, pipe: Connection) -> None:
    """A child: answer None when a call is done, a text when it failed; end with the pipe."""
    # Ctrl-C reaches the whole group; the first process handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A call in flight does not read the pipe: its collectives would wait for dead processes and hold a GPU's memory.
    follow_parent()
    torch.set_num_threads(threads)
    trainers: dict[int, MegatronTrainer] = {}
    try:
        _init_groups(folder, rank, count)
        pipe.send(None)
        while True:
            _obey(trainers, rank, *pipe.recv())
            pipe.send(None)
    except (EOFError, BrokenPipeError):
        parallel.destroy()
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
                # Memory that torch keeps here for later would be missing to an engine that now wakes on this GPU.
                torch.cuda.empty_cache()


class _Grid:
    """The processes that trainers share, from the first of them to the last."""

    def __init__(self) -> None:
        self._users = 0
        self._folder: TemporaryDirectory[str] | None = None
        self._children: Children | None = None

    def enter(self, config: RunConfig) -> Children:
        """The other processes; started for the first trainer."""
        if self._children is None:
            self._folder = TemporaryDirectory(prefix="fp8-grpo-")
            self._children = Children(Path(self._folder.name), config.training.megatron.gpus, config.threads)
        self._users += 1
        return self._children

    def leave(self) -> None:
        """One trainer less."""
        self._users -= 1
        if self._users == 0:
            self.end()

    def end(self) -> None:
        """End all processes; a second call does nothing."""
        if self._children is not None and self._folder is not None:
            self._children.end()
            self._folder.cleanup()
        self._children = self._folder = None


_grid = _Grid()
_keys = count()
atexit.register(_grid.end)


class GridTrainer:
    """`MegatronTrainer` in all processes of the grid; the results are those of this one's part."""

    def __init__(self, config: RunConfig, arch: Architecture, masters: Mapping[str, Tensor]) -> None:
        """Close it before a trainer on another grid is started."""
        self.arch, self._key, self._children = arch, next(_keys), _grid.enter(config)
        self._own: MegatronTrainer | None = self._children.build(self._key, config, arch, masters)

    @property
    def version(self) -> int:
        """Updates of the policy."""
        return self._part().version

    @property
    def masters(self) -> Mapping[str, Tensor]:
        found: Mapping[str, Tensor] = self._call("whole_policy")
        return found

    def logprobs(self, batch: TokenBatch, temperature: float, scales: Sequence[LayerScales] | None) -> ScoredBatch:
        found: ScoredBatch = self._call("logprobs", batch, temperature, scales)
        return found

    def statistics(self, batch: TokenBatch) -> KvStatistics:
        found: KvStatistics = self._call("statistics", batch)
        return found

    def step(self, batch: RolloutBatch, temperature: float, scales: Sequence[LayerScales] | None) -> TrainReport:
        found: TrainReport = self._call("step", batch, temperature, scales)
        return found

    def describe(self) -> dict[str, object]:
        return self._part().describe()

    def export(self) -> ShippedTensors:
        found: ShippedTensors = self._call("export")
        return found

    def digest(self) -> str:
        found: str = self._call("digest")
        return found

    def save(self, folder: Path) -> None:
        self._call("save", folder)

    def load(self, folder: Path) -> None:
        self._call("load", folder)

    def close(self) -> None:
        """Drop the policy in every process; the last trainer ends the others. A second call does nothing."""
        if self._own is not None:
            self._own = None
            self._children.drop(self._key)
            _grid.leave()

    def _call(self, method: str, *arguments: Any) -> Any:
        return self._children.call(self._key, self._part(), method, arguments)

    def _part(self) -> MegatronTrainer:
        assert self._own is not None, "the trainer is closed"
        return self._own
