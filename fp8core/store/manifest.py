"""The manifest of a step, and the versions of sources, libraries and machine that it names."""

import hashlib
import os
import platform
import re
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from fp8core.store.json_text import Bytes, Seconds, StepNumber, canonical_json

ReplayLevel = Literal["exact", "deterministic", "tolerant"]
PACKAGES = tuple(Path(__file__).parents[2] / name for name in ("fp8core", "tasks"))
"""The code that computes: the packages whose sources a code version is the digest of."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Content(_Part):
    """An artifact by what it holds."""

    digest: str = Field(description="SHA-256 of the file.")
    size: Bytes = Field(description="Bytes.")


_TIP = re.compile(r"([0-9]{1,8}):([0-9a-f]{64})")

# Artifacts of one step: task -> artifact -> content.
Contents = dict[str, dict[str, Content]]


class StepRecord(_Part):
    """The deterministic part: no time, no path, no machine."""

    step: StepNumber = Field(description="0 is the warm start.")
    predecessor: str | None = Field(description="Digest of the previous step's record; null for the first.")
    config_digest: str = Field(description="SHA-256 of the settings that determine numbers (`config.load`).")
    code_version: str = Field(description="Digest of the sources (`manifest.code_version`).")
    steps: int = Field(ge=1, description="Steps the run was to have; the last one always evaluates.")
    inputs: Contents = Field(description="What each task read: task, port, content.")
    outputs: Contents = Field(description="What each task stored: task, artifact, content.")
    model_revision: str | None = Field(description="Commit of a hub model; null for a folder or from scratch.")
    seeds: dict[str, int] = Field(description="What the seed of each sample is made of: `run`, `step`.")
    scales_digest: str | None = Field(description="SHA-256 of the scales that go with the policy it produced.")
    precision: dict[str, JsonValue] = Field(description="The precision contract, as configured.")
    executed: dict[str, JsonValue] = Field(
        description="What engine, trainer, verifier and a loss of your own are (`describe`, digests)."
    )
    level: ReplayLevel = Field(description="What a replay of this step can promise (docs/concepts/durability.md).")
    weights_digest: str = Field(description="Of the policy that the step produced (`numerics.fingerprint`).")
    versions: dict[str, str] = Field(description="Library -> version (`manifest.library_versions`).")


class StepObservations(_Part):
    """The part that differs from one execution to the next."""

    timings: dict[str, Seconds] = Field(description="Seconds per task.")
    hardware: dict[str, JsonValue] = Field(description="Processor, cores, memory in bytes, machine.")
    git: dict[str, JsonValue] = Field(
        default_factory=dict, description="Commit of the checkout, and whether it was `dirty`; empty: no checkout."
    )
    paths: dict[str, str] = Field(description="Artifact name -> path relative to the run directory.")
    cluster: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="Address, GPU and process of each engine and rank; empty: all lay in one process.",
    )

    environment: dict[str, Seconds] = Field(
        default_factory=dict,
        description="Answers of an environment to rollouts: their number, and seconds (p50, p95, max); empty: none, or "
        "another process had them.",
    )
    drafts: dict[str, int] = Field(
        default_factory=dict,
        description="Counts of drafts in rollouts (`rollout.drafts`); empty: no speculation, or another process had "
        "them.",
    )


class StepManifest(_Part):
    """Everything that is kept about one step besides its artifacts."""

    schema_version: Literal[2] = Field(2, description="Version of this schema; a reader takes its own and no other.")
    record: StepRecord = Field(description="What a redo or a replay of the step reproduces; digested and chained.")
    observed: StepObservations = Field(description="What differs from one execution to the next; not digested.")


def record_digest(manifest: StepManifest) -> str:
    return hashlib.sha256(canonical_json(manifest.record.model_dump(mode="json"), "record")).hexdigest()


class ChainTip(NamedTuple):
    """The newest link of a chain; as text `12:` and the 64 hex digits of the digest."""

    step: int
    digest: str

    @classmethod
    def of(cls, manifest: StepManifest) -> Self:
        return cls(manifest.record.step, record_digest(manifest))

    @classmethod
    def parse(cls, text: str) -> Self:
        if (parts := _TIP.fullmatch(text)) is None:
            raise ValueError(f"{text[:80]!r} is not the tip of a chain (STEP:DIGEST)")
        return cls(int(parts[1]), parts[2])

    def __str__(self) -> str:
        return f"{self.step}:{self.digest}"


# CUDA's are compiled when they are first used.
_SOURCES = {".py", ".cu", ".cuh"}
_LIBRARIES = ("torch", "numpy", "pyarrow", "prefect", "mlflow")


@cache
def current_code() -> str:
    return code_version(*PACKAGES)


def code_version(*packages: Path) -> str:
    """SHA-256 over the sorted (relative path, content) of the sources in package folders."""
    sources = sorted(
        ((package.name / path.relative_to(package)).as_posix(), path)
        for package in packages
        for path in package.rglob("*")
        if path.suffix in _SOURCES
    )
    assert sources, f"no sources in {', '.join(map(str, packages))}"
    digest = hashlib.sha256()
    for name, path in sources:
        digest.update(f"{name}\n{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def library_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    releases = {name: installed_version(name) for name in _LIBRARIES}
    return versions | {name: version for name, version in releases.items() if version is not None}


def installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def hardware() -> dict[str, JsonValue]:
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "machine": platform.machine(),
    }


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def git_state(folder: Path) -> dict[str, JsonValue]:
    """Commit of the checkout that tracks a folder, and whether it has changes; empty when no checkout does."""
    # A folder installed inside somebody else's checkout is not tracked by it.
    commit = _git(folder, "rev-parse", "HEAD") if _git(folder, "ls-files") else None
    if commit is None:
        return {}
    return {"commit": commit, "dirty": bool(_git(folder, "status", "--porcelain"))}
