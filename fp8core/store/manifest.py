"""The manifest of a step: `record`, which a redo or a replay reproduces bit for bit, and `observed`, which differs.

The record of a step names the digest of its predecessor's record, so that the last record vouches for the whole run.
"""

import hashlib
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from fp8core.store.artifacts import canonical_json

ReplayLevel = Literal["exact", "deterministic", "tolerant"]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Content(_Part):
    """An artifact by what it holds."""

    digest: str = Field(description="SHA-256 of the file.")
    size: int = Field(ge=0, description="Bytes.")


# Artifacts of one step: task -> artifact -> content.
Contents = dict[str, dict[str, Content]]


class StepRecord(_Part):
    """The deterministic part: no time, no path, no machine."""

    step: int = Field(ge=0, description="0 is the warm start.")
    predecessor: str | None = Field(description="Digest of the previous step's record; null for the first.")
    config_digest: str = Field(description="SHA-256 of the settings that determine numbers (`config.load`).")
    code_version: str = Field(description="Digest of the sources (`versions.code_version`).")
    steps: int = Field(ge=1, description="Steps the run was to have; the last one always evaluates.")
    inputs: Contents = Field(description="What each task read: task, port, content.")
    outputs: Contents = Field(description="What each task stored: task, artifact, content.")
    model_revision: str | None = Field(description="Commit of a hub model; null for a folder or from scratch.")
    seeds: dict[str, int] = Field(description="What the seed of each sample is made of: `run`, `step`.")
    scales_digest: str | None = Field(description="SHA-256 of the scales that go with the policy it produced.")
    precision: dict[str, JsonValue] = Field(description="The precision contract, as configured.")
    executed: dict[str, JsonValue] = Field(description="What engine, trainer and verifier said they run (`describe`).")
    level: ReplayLevel = Field(description="What a replay of this step can promise (docs/durability.md).")
    weights_digest: str = Field(description="Of the policy that the step produced (`numerics.fingerprint`).")
    versions: dict[str, str] = Field(description="Library -> version (`versions.library_versions`).")


class StepObservations(_Part):
    """The part that differs from one execution to the next."""

    timings: dict[str, float] = Field(description="Seconds per task.")
    hardware: dict[str, JsonValue] = Field(description="Processor, cores, memory in bytes, machine.")
    git: dict[str, JsonValue] = Field(
        default_factory=dict, description="Commit of the checkout, and whether it was `dirty`; empty: no checkout."
    )
    paths: dict[str, str] = Field(description="Artifact name -> path relative to the run directory.")


class StepManifest(_Part):
    """Everything that is kept about one step besides its artifacts."""

    schema_version: Literal[2] = Field(2, description="Version of this schema; a reader takes its own and no other.")
    record: StepRecord = Field(description="What a redo or a replay of the step reproduces; digested and chained.")
    observed: StepObservations = Field(description="What differs from one execution to the next; not digested.")


def record_digest(manifest: StepManifest) -> str:
    """SHA-256 (64 hex digits) of the canonical JSON of the record."""
    return hashlib.sha256(canonical_json(manifest.record.model_dump(mode="json"), "record")).hexdigest()


def first_broken_link(manifests: Sequence[StepManifest]) -> int | None:
    """The first step, of a run's manifests in order, that does not name the one before it; None: all do."""
    expected = None
    for manifest in manifests:
        if manifest.record.predecessor != expected:
            return manifest.record.step
        expected = record_digest(manifest)
    return None
