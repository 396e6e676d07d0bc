"""Settings of rewards: the verifier of answers, and what may be added to its score."""

from typing import Annotated

from pydantic import Field, JsonValue, ValidationError, field_validator, model_validator

from fp8core.config.section import Section, UserSource, choice_of
from fp8core.config.shipped import SHIPPED_VERIFIERS

Verifier = Annotated[UserSource, choice_of(SHIPPED_VERIFIERS, "function")]


class FormatOptions(Section):
    """Right: a finished completion that has each tag once, in this order. Tags that end the prompt count as its own."""

    tags: list[Annotated[str, Field(min_length=1)]] = Field(min_length=1, max_length=16)


class OtherVerifierConfig(Section):
    """A verifier beside `reward.verifier`, within the same limits."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]{0,39}$", description="Of its metric: reward/NAME.")
    verifier: Verifier = Field(description="As `reward.verifier`.")
    weight: float = Field(1.0, ge=-100, le=100, description="Times this its score is added to the reward.")
    options: dict[str, JsonValue] = Field(default_factory=dict, description="Of `format`: tags; or of your function.")

    @model_validator(mode="after")
    def _verifier_is_one(self) -> "OtherVerifierConfig":
        RewardConfig(verifier=self.verifier, options=self.options)
        return self


class RewardConfig(Section):
    """Scores of completions."""

    verifier: Verifier = Field(
        "chain",
        description="chain, integer, math-verify, format; or your function, `module:name` or `path/to/file.py:name`.",
    )
    options: dict[str, JsonValue] = Field(default_factory=dict, description="Of `format`: tags; or of your function.")
    others: list[OtherVerifierConfig] = Field(
        default_factory=list,
        max_length=16,
        description="Verifiers whose weighted scores are added; outcomes are those of `verifier`.",
    )
    timeout_seconds: float = Field(2.0, gt=0, le=3600, description="Longest wait for the verdict on one answer.")
    memory_mb: int = Field(1024, ge=16, le=1 << 20, description="MiB of one answer, beyond the loaded verifier.")
    workers: int = Field(2, ge=1, le=256, description="Processes of math-verify or your verifier.")

    @field_validator("others")
    @classmethod
    def _told_apart(cls, others: list[OtherVerifierConfig]) -> list[OtherVerifierConfig]:
        if len({other.name for other in others}) < len(others):
            raise ValueError("two have one name")
        return others

    @model_validator(mode="after")
    def _only_functions_have_options(self) -> "RewardConfig":
        if self.verifier == "format":
            try:
                FormatOptions.model_validate(self.options)
            except ValidationError as error:
                raise ValueError("options: verifier=format takes tags, a list of 1 to 16 texts") from error
        elif self.options and self.verifier in SHIPPED_VERIFIERS:
            raise ValueError(f"options: verifier={self.verifier} takes none")
        return self
