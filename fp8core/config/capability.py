"""Formats that each platform can compute, and pairs that may meet: checked before anything is loaded.

A CPU emulates all, and Hopper (sm_90) computes all. Other GPUs compute no block FP8 here.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version

from fp8core.config.precision import PrecisionContract
from fp8core.errors import refuse

_FP8_HARDWARE = {"cpu", "sm_90"}


@dataclass(frozen=True)
class Environment:
    """Variables that decide what is computed, and those that only make it faster."""

    required: Mapping[str, str] = field(default_factory=dict)
    suggested: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Node:
    """A machine that engines and trainers compute on.

    Attributes:
        platform: `cpu`, or the compute capability of its first GPU as `sm_90`.
        gpus: that engines and trainers can have; of a cluster, those of all its nodes.
        gpu: name of its first GPU and bytes of its memory; None where there is none.
        memory: bytes of the host.
        packages: version of each distribution that was asked for and is installed.
    """

    platform: str
    gpus: int = 0
    gpu: tuple[str, int] | None = None
    memory: int = 0
    packages: Mapping[str, str] = field(default_factory=dict)

    def version(self, distribution: str) -> str:
        if distribution not in self.packages:
            raise PackageNotFoundError(distribution)
        return self.packages[distribution]


def this_platform() -> str:
    # A configuration is read without torch, whose import takes seconds.
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def this_node(packages: Iterable[str] = ()) -> Node:
    import torch

    versions = dict[str, str]()
    for name in packages:
        with suppress(PackageNotFoundError):
            versions[name] = installed_version(name)
    gpu = None
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        gpu = properties.name, properties.total_memory
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Node(this_platform(), torch.cuda.device_count(), gpu, memory, versions)


def check_contract(contract: PrecisionContract, platform: str, has_correction: bool) -> None:
    """Refuse a contract that the platform cannot keep, or whose sides differ with nothing to correct for it."""
    refuse(
        f"precision.{each}"
        for each in (*_beyond_hardware(contract, platform), *_unlike_sides(contract, has_correction))
    )


def _beyond_hardware(contract: PrecisionContract, platform: str) -> Iterator[str]:
    for side in ("rollout", "training"):
        formats = getattr(contract, side)
        if platform not in _FP8_HARDWARE and formats.linear == "fp8_block":
            yield f"{side}.linear=fp8_block: {platform} has no FP8 block GEMM; set it to bf16"
        if platform not in _FP8_HARDWARE and formats.kv_cache == "fp8":
            yield f"{side}.kv_cache=fp8: {platform} has no FP8 attention; set it to bf16"


def _unlike_sides(contract: PrecisionContract, has_correction: bool) -> Iterator[str]:
    unlike = [f"{part} {ours}/{theirs}" for part, ours, theirs in contract.differing]
    if unlike and not has_correction and not contract.accept_mismatch:
        yield (
            f"rollout and precision.training: they differ in {', '.join(unlike)} and correction.method=none leaves "
            "that uncorrected; make them equal, correct for it, or set precision.accept_mismatch=true"
        )
