"""The content of a run's artifacts, kind by kind: the one place that defines it.

Kinds of JSON have a model here, kinds of tables a schema in `tables.TABLES`, kinds of tensors bounds. A kind that is
not named belongs to a user's step. Its file is sound in its format and within the bounds that all files have.
`ArtifactStore` reads every file through this, and `verify` opens every file with `check_file`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

import pyarrow as pa
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    JsonValue,
    Tag,
    TypeAdapter,
    model_validator,
)

from fp8core.durable import read_stored
from fp8core.errors import StoredFileError, UserError, printable
from fp8core.models.safetensors_files import StoredTensor, read_header
from fp8core.store.json_text import StepNumber, parse_json, validated
from fp8core.store.manifest import StepManifest
from fp8core.store.tables import MOST_ROWS, TABLES, open_table, read_columns

_BUCKETS = 1 << 11  # `numerics.kv_scales.BUCKETS`; a bucket is a part of the range of FP32.
_MOST_LAYERS = 10_000
MOST_TENSORS, MOST_DIMENSIONS = 1_000_000, 8
HELDOUT_SAMPLES, SAMPLE_CHARACTERS = 8, 800
"""What an evaluation keeps of texts: the first held-out prompts, the same ones each time, and characters of a text."""

Digest = Annotated[str, Field(min_length=1, max_length=128)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Magnitude = Annotated[float, Field(ge=0, strict=True, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=1 << 53, strict=True)]
Share = Annotated[float, Field(ge=0, le=1, strict=True)]


def _short(name: str) -> str:
    if not 0 < len(name) <= 500 or not name.isprintable():
        raise ValueError("not a name: 1 to 500 printable characters")
    return name


Name = Annotated[str, AfterValidator(_short)]
Metrics = dict[Name, Number]


class _Content(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class Policy(_Content):
    """The weights of a version of the policy."""

    version: StepNumber
    weights_digest: Digest


class TeacherCheckpoint(_Content):
    """The weights of a teacher."""

    model: str = Field(min_length=1, max_length=4096)
    revision: Name | None
    weights_digest: Digest


class _Layer(_Content):
    q: Magnitude
    k: Magnitude
    v: Magnitude


class _LayerScales(_Content):
    q: Annotated[float, Field(gt=0, strict=True)]
    k: Annotated[float, Field(gt=0, strict=True)]
    v: Annotated[float, Field(gt=0, strict=True)]


class Scales(_Content):
    """Scales of Q, K and V of a version, and the magnitudes that the next average starts from, by layer."""

    version: StepNumber
    rule: Name
    layers: list[_LayerScales] = Field(max_length=_MOST_LAYERS)
    amax: list[_Layer]

    @model_validator(mode="after")
    def _as_many_layers(self) -> Self:
        if len(self.layers) != len(self.amax):
            raise ValueError(f"layers: {len(self.layers)} of them, but {len(self.amax)} of amax")
        return self


class _Histogram(_Content):
    amax: Magnitude
    first: int = Field(ge=0, lt=_BUCKETS, strict=True)
    counts: list[Count] = Field(min_length=1)

    @model_validator(mode="after")
    def _within_the_range(self) -> Self:
        if self.first + len(self.counts) > _BUCKETS or not sum(self.counts):
            raise ValueError(f"counts: must be those of 1 element or more in buckets up to {_BUCKETS}")
        return self


class _LayerHistograms(_Content):
    q: _Histogram
    k: _Histogram
    v: _Histogram


class KvStatistics(_Content):
    """Magnitudes of Q, K and V that the pass for log-probs saw, by layer."""

    version: StepNumber
    amax: list[_Layer] = Field(max_length=_MOST_LAYERS)
    histograms: list[_LayerHistograms]
    saturated_share: Share

    @model_validator(mode="after")
    def _as_many_layers(self) -> Self:
        if len(self.histograms) != len(self.amax):
            raise ValueError(f"histograms: {len(self.histograms)} layers, but {len(self.amax)} of amax")
        return self


class TrainReport(_Content):
    """Means over the updates of one step (`training.trainer.TrainReport`); later versions add numbers."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Number | Metrics | str | None]

    version: StepNumber
    digest: Digest
    loss: Number
    grad_norm: Number
    clip_fraction: Number
    ratio_mean: Number
    weight_mean: Number
    reference_kl: Number
    learning_rate: Number
    tokens: Count
    rows: Count
    correction: Metrics


class _Probe(_Content):
    tokens: Count
    differing: Count
    error: Magnitude


class SyncReport(_Content):
    """The state of the engine after an update (`rollout.engine.SyncReport`), and what it reported to run."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, JsonValue]

    version: StepNumber
    digest: Digest
    scales: list[_LayerScales] = Field(max_length=_MOST_LAYERS)
    engine: dict[str, JsonValue]
    probe: _Probe | None = None


class _Style(_Content):
    style: Name
    accuracy: Share
    target: Share


class HeldoutSample(_Content):
    """A held-out prompt, the end of its text, and the beginning of the greedy completion, of `length` tokens."""

    prompt_id: Name
    prompt: str = Field(max_length=SAMPLE_CHARACTERS)
    text: str = Field(max_length=SAMPLE_CHARACTERS)
    length: Count
    score: Number


class _Episodes(_Content):
    """Means of the episodes of an environment."""

    turns: Magnitude
    tool_calls: Magnitude
    tool_errors: Magnitude
    malformed: Magnitude


class Evaluation(_Content):
    """Held-out accuracy; all of it is absent in a step that does not evaluate."""

    accuracy: Number
    prompts: int = Field(ge=1, le=1 << 53, strict=True)
    length_mean: Magnitude
    outcomes: dict[Name, Count]
    scores: dict[Name, Number] | None = None
    samples: list[HeldoutSample] | None = Field(None, max_length=HELDOUT_SAMPLES)
    styles: list[_Style] | None = None
    episodes: _Episodes | None = None


class _NoEvaluation(_Content):
    """Of a step that was not to be evaluated."""


class _Estimate(_Content):
    value: Number
    low: Number
    high: Number


class PrecisionGap(_Content):
    """The distance of policy 0 from itself in BF16 (`run.precision_gap`)."""

    prompts: Annotated[int, Field(ge=1, le=1 << 53, strict=True)]
    tokens: Count
    temperature: Magnitude
    nats: Magnitude
    k3: Number
    error: Magnitude
    # Versions before compared no distributions.
    kl: Number | None = None
    same_choice: Magnitude | None = None
    answer_shift: Number | None = None
    accuracy: _Estimate
    bf16_accuracy: _Estimate
    difference: _Estimate


class Schedule(_Content):
    """The chunks that were written beside an update (`rollout.stream.run_ahead`), in tokens one after the other."""

    version: StepNumber
    chunks: list[Annotated[int, Field(ge=1, le=1 << 20, strict=True)]] = Field(max_length=1 << 20)


class _Eviction(_Content):
    """A prompt that left without a step to learn from it (`rollout.stream.Eviction`)."""

    step: StepNumber
    batch: StepNumber
    group: Count
    prompt_id: Name
    tokens: Count
    oldest: StepNumber
    newest: StepNumber
    reason: Name


def _which(value: Any) -> str:
    return "absent" if value == {} else "measured"


_Evaluation = Annotated[
    Annotated[Evaluation, Tag("measured")] | Annotated[_NoEvaluation, Tag("absent")], Discriminator(_which)
]


JSON: Mapping[str, TypeAdapter[Any]] = {
    "policy": TypeAdapter(Policy),
    "teacher_checkpoint": TypeAdapter(TeacherCheckpoint),
    "scales": TypeAdapter(Scales),
    "kv_statistics": TypeAdapter(KvStatistics),
    "train_report": TypeAdapter(TrainReport),
    "sync_report": TypeAdapter(SyncReport),
    "evaluation": TypeAdapter(_Evaluation),
    "precision_gap": TypeAdapter(PrecisionGap),
    "schedule": TypeAdapter(Schedule),
    "evictions": TypeAdapter(Annotated[list[_Eviction], Field(max_length=MOST_ROWS)]),
    "metrics": TypeAdapter(Annotated[Metrics, Field(max_length=100_000)]),
    "manifest": TypeAdapter(StepManifest),
}
TENSORS = frozenset({"weights"})
"""Kinds of tensors: finite in number and dimensions; who reads them knows names and shapes."""

EXTENSIONS: Mapping[str, str] = {
    **dict.fromkeys(JSON, "json"),
    **dict.fromkeys(TABLES, "parquet"),
    **dict.fromkeys(TENSORS, "safetensors"),
}
"""Kind -> the type of its files; of kinds that are not ours any of the three."""


def read_json(data: bytes, kind: str, place: object) -> Any:
    """The value of a JSON artifact. Raises StoredFileError: `place: field: problem`."""
    _refuse_other_type(kind, "json", place)
    value = parse_json(data, place)
    if kind in JSON:
        validated(value, JSON[kind], f"{place}: not of kind {kind}")
    return value


def read_table(source: Any, kind: str, place: object, columns: Sequence[str] | None = None) -> pa.Table:
    """The rows of a parquet artifact, or some columns. Raises StoredFileError: `place: column: problem`."""
    _refuse_other_type(kind, "parquet", place)
    return read_columns(open_table(source, kind, place), kind, place, columns)


def read_tensor_header(path: Path, kind: str) -> dict[str, StoredTensor]:
    """The tensors that a safetensors artifact declares, all bytes accounted for. Raises StoredFileError."""
    _refuse_other_type(kind, "safetensors", path)
    return tensor_header(path)


def tensor_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file of a run. Raises StoredFileError: `path: tensor: problem`."""
    try:
        stored = read_header(path)
    except StoredFileError:
        raise
    except UserError as error:
        raise StoredFileError(printable(str(error))) from error
    if len(stored) > MOST_TENSORS:
        raise StoredFileError(f"{path}: {len(stored)} tensors; a file has at most {MOST_TENSORS}")
    for name, tensor in stored.items():
        if len(tensor.spec.shape) > MOST_DIMENSIONS:
            raise StoredFileError(f"{path}: tensor {printable(name)[:80]}: {len(tensor.spec.shape)} dimensions")
    return stored


def check_file(path: Path, kind: str) -> None:
    """Open an artifact and check all that its kind requires, a column at a time. Raises StoredFileError."""
    match path.suffix:
        case ".json":
            try:
                read_json(read_stored(path), kind, path)
            except OSError as error:
                raise StoredFileError(f"{path}: cannot be read: {error.strerror}") from error
        case ".parquet":
            _check_table(path, kind)
        case ".safetensors":
            read_tensor_header(path, kind)
        case other:
            raise StoredFileError(f"{path}: {other} is no type of artifact")


def _check_table(path: Path, kind: str) -> None:
    """A column of routed experts is a hundred times larger than the rest: it is never held beside another."""
    _refuse_other_type(kind, "parquet", path)
    file = open_table(path, kind, path)
    schema = TABLES.get(kind)
    together = () if schema is None else {*schema.tokens, *schema.key}
    read_columns(file, kind, path, [name for name in file.schema_arrow.names if name in together])
    for name in file.schema_arrow.names:
        if name not in together:
            read_columns(file, kind, path, [name])


def _refuse_other_type(kind: str, extension: str, place: object) -> None:
    if EXTENSIONS.get(kind, extension) != extension:
        raise StoredFileError(f"{place}: kind {kind} is stored as {EXTENSIONS[kind]}, not as {extension}")
