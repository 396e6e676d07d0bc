"""The content of a run's artifacts, kind by kind: the one place that defines it.

Kinds of JSON have a model here, kinds of tables a schema in `tables.TABLES`. A kind that is not named belongs to a
user's step. `ArtifactStore` reads every file through this.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    JsonValue,
    Tag,
    TypeAdapter,
    ValidationError,
)

from fp8core.errors import StoredFileError, UserError, printable
from fp8core.models.safetensors_files import StoredTensor, read_header
from fp8core.store.json_text import StepNumber, mistake, parse_json
from fp8core.store.manifest import StepManifest

HELDOUT_SAMPLES, SAMPLE_CHARACTERS = 8, 800
"""What an evaluation keeps of texts: the first held-out prompts, the same ones each time, and characters of a text."""

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Magnitude = Annotated[float, Field(ge=0, strict=True, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, strict=True)]
Share = Annotated[float, Field(ge=0, le=1, strict=True)]

Metrics = dict[str, Number]


class _Content(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class Policy(_Content):
    """The weights of a version of the policy."""

    version: StepNumber
    weights_digest: str


class TeacherCheckpoint(_Content):
    """The weights of a teacher."""

    model: str
    revision: str | None
    weights_digest: str


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
    rule: str
    layers: list[_LayerScales]
    amax: list[_Layer]


class KvStatistics(_Content):
    """Magnitudes of Q, K and V that the pass for log-probs saw, by layer."""

    version: StepNumber
    amax: list[_Layer]
    saturated_share: Share


class TrainReport(_Content):
    """Means over the updates of one step (`training.trainer.TrainReport`); later versions add numbers."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Number | Metrics | str | None]

    version: StepNumber
    digest: str
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
    digest: str
    scales: list[_LayerScales]
    engine: dict[str, JsonValue]
    probe: _Probe | None = None


class _Style(_Content):
    style: str
    accuracy: Share
    target: Share


class HeldoutSample(_Content):
    """A held-out prompt, the end of its text, and the beginning of the greedy completion, of `length` tokens."""

    prompt_id: str
    prompt: str
    text: str
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
    prompts: Count
    length_mean: Magnitude
    outcomes: dict[str, Count]
    scores: dict[str, Number] | None = None
    samples: list[HeldoutSample] | None = None
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

    prompts: Count
    tokens: Count
    temperature: Magnitude
    nats: Magnitude
    k3: Number
    error: Magnitude
    kl: Number
    same_choice: Magnitude
    answer_shift: Number | None = None
    accuracy: _Estimate
    bf16_accuracy: _Estimate
    difference: _Estimate


class Schedule(_Content):
    """The chunks that were written beside an update (`rollout.stream.run_ahead`), in tokens one after the other."""

    version: StepNumber
    chunks: list[Count]


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
    "metrics": TypeAdapter(Metrics),
    "manifest": TypeAdapter(StepManifest),
}


def read_json(data: bytes, kind: str, place: object) -> Any:
    """The value of a JSON artifact. Raises StoredFileError: `place: field: problem`."""
    value = parse_json(data, place)
    if kind in JSON:
        try:
            JSON[kind].validate_python(value)
        except ValidationError as error:
            raise StoredFileError(f"{place}: not of kind {kind}: {mistake(error)}") from error
    return value


def tensor_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors that a safetensors file of a run declares. Raises StoredFileError."""
    try:
        return read_header(path)
    except StoredFileError:
        raise
    except UserError as error:
        raise StoredFileError(printable(str(error))) from error
