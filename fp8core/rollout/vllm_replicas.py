"""vLLM on several GPUs of one machine: one complete engine for each, in a process of its own.

Prompts are dealt out by their order alone. What vLLM computes may depend on what is decoded together, so a request that
is repeated must meet the same engines in the same company. An update is sent once, and every engine reads it.
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
from fp8core.rollout.engine import Completion, PolicyScales, PromptGroup, Sampling, SyncReport
from fp8core.rollout.vllm_child import Start
from fp8core.rollout.vllm_layout import UpdateError, specs_of
from fp8core.rollout.vllm_process import EngineProcess, EngineProcessError
from fp8core.rollout.vllm_settings import WORKER
from fp8core.rollout.vllm_transfer import parcel
from fp8core.rollout.vllm_versions import VllmBuild

Found = TypeVar("Found")


def check_gpus(options: VllmConfig, build: VllmBuild, here: int) -> None:
    """Raises UserError where engines are to run on more GPUs than are `here`; without GPUs they share the CPU."""
    if build.platform == "cuda" and options.gpus > here:
        raise UserError(f"rollout.vllm.gpus={options.gpus}: this machine has {here}")


def deal(groups: Sequence[PromptGroup], engines: int) -> list[list[PromptGroup]]:
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
            self._ask("start", Start(arch, contract, options, max_batch, build, worker, routes))
        except BaseException:
            for process in self._processes:
                process.end(patience=0.0)
            raise

    def update(self, tensors: Mapping[str, Tensor], scales: PolicyScales, version: int) -> SyncReport:
        """As `VllmEngine.update`, in all engines at the same time.

        Raises:
            UpdateError: also when the engines do not hold the same afterwards; it names two that differ.
        """
        self._ask("expect", specs_of(tensors), scales, version)
        if self._asleep:
            # What torch keeps in this process for later would be missing to an engine that wakes on the same GPU.
            torch.cuda.empty_cache()
        with parcel(self._within_reach(tensors)) as lent:
            reports: list[SyncReport] = self._ask("receive", lent, scales, version)
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
        found: list[str] = self._ask("fingerprint")
        return self._same("weights", found)

    def describe(self) -> dict[str, object]:
        """As `VllmEngine.describe`, which must be the same of all, and their number; raises UpdateError else."""
        found: list[dict[str, object]] = self._ask("describe")
        same = {name: self._same(name, [each[name] for each in found]) for name in found[0]}
        return {**same, "engines": len(found)}

    def generate(self, groups: Sequence[PromptGroup], sampling: Sampling) -> Iterator[list[Completion]]:
        """As `VllmEngine.generate`; each yield is of one engine."""
        if self._sleeps:
            # Give back the policy that was lent from this process (`VllmEngine.steps`).
            torch.cuda.empty_cache()
        shares = zip(self._processes, deal(groups, len(self._processes)), strict=True)
        asked = {process: process.ask("generate", share, sampling) for process, share in shares if share}
        try:
            while asked:
                ready = wait([process.pipe for process in asked])
                for process in [process for process in asked if process.pipe in ready]:
                    answer = process.receive(asked[process])
                    if answer.kind == "finished":
                        yield answer.content
                    else:
                        del asked[process]
        finally:
            for process in asked:
                process.ask("drop")

    def rest(self) -> None:
        """As `VllmEngine.rest`, in all engines."""
        self._ask("rest")
        self._asleep = self._sleeps

    def close(self) -> None:
        """End all processes; a second call does nothing."""
        self._end()

    def call_worker(self, engine: int, method: str, *arguments: Any) -> Any:
        """As `VllmEngine.call_worker`, of one engine."""
        process = self._processes[engine]
        return process.receive(process.ask("call_worker", method, *arguments)).content

    def _ask(self, method: str, *arguments: Any) -> list[Any]:
        """What every engine answers. All are waited for, then the first error is raised."""
        asked = [(process, process.ask(method, *arguments)) for process in self._processes]
        found, errors = list[Any](), list[Exception]()
        for process, number in asked:
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
    """What two engines hold, in words, where it is not the same."""
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
        process.ask("close")
    for process in processes:
        process.end()
