"""The result of an evaluation: what was asked of whom, and what came of it in each precision."""

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from fp8core.evaluation.measure import Estimate, Measurement


class EvaluationResult(BaseModel):
    """What `fp8-grpo evaluate --json` writes and MLflow keeps."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: str = Field(description="Run or folder, as it was given.")
    step: int | None = Field(description="Step of the run; null: a folder.")
    weights_digest: str | None = Field(description="Of the policy's FP32 weights, where a run or an export names it.")
    config: str = Field(description="Name of the configuration.")
    data: str = Field(description="Where the problems come from.")
    data_digest: str = Field(description="SHA-256 over questions and references, in order.")
    prompts: int
    samples: int = Field(description="Of each prompt.")
    temperature: float
    max_new_tokens: int
    seed: int
    confidence: float = Field(description="Of every interval.")
    verifier: dict[str, JsonValue]
    precisions: dict[str, Measurement]
    engines: dict[str, dict[str, JsonValue]] = Field(description="What the engine said it ran, by precision.")
    differences: dict[str, dict[str, Estimate]] = Field(
        description="Paired by prompt, by precision: it minus the first precision."
    )
