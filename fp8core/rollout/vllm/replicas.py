"""vLLM on several GPUs of one machine: one complete engine for each, in a process of its own.

Prompts are distributed by their order alone. vLLM's results may depend on the batch, so a repeated request must go to
the same engine, batched with the same requests. An update is sent once, and every engine reads it.
"""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import wait
from typing import Any, TypeVar

import torch
from torch import Tensor

from fp8core.config.precision import PrecisionContract
from fp8core.config.vllm import VllmConfig
from fp8core.errors import UserError
from fp8core.models.architecture import Architecture
from fp8core.rollout.engine import Completion, PolicyScales, Probe, PromptGroup, Sampling, SyncReport
from fp8core.rollout.vllm.process import EngineProcess, EngineProcessError
from fp8core.rollout.vllm.requirements import VllmBuild
from fp8core.rollout.vllm.settings import WORKER
from fp8core.rollout.vllm.weights import UpdateError, share_weights, specs_of

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
