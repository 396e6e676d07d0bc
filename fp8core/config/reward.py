"""Settings of rewards: the verifier of answers, and what may be added to its score."""

import json
import re
from collections.abc import Collection, Mapping
from typing import Annotated, Literal, NamedTuple
from urllib.parse import urlsplit

from pydantic import Field, JsonValue, ValidationError, field_validator, model_validator

from fp8core.config.section import Section, UserSource, choice_of, refusal
from fp8core.config.shipped import SHIPPED_VERIFIERS
from fp8core.errors import without_passwords

Verifier = Annotated[UserSource, choice_of(SHIPPED_VERIFIERS, "function")]


class FormatOptions(Section):
    """Right: a finished completion that has each tag once, in this order. Tags that end the prompt count as its own."""

    tags: list[Annotated[str, Field(min_length=1)]] = Field(
        min_length=1, max_length=16, description="A finished completion has each once, in this order."
    )


PLACEHOLDER = re.compile(r"\{(\w+)\}")
"""In the template of a judge."""
_OPTIONS_TEXT = "Those of a shipped verifier are below; or arguments of your function."


class JudgeOptions(Section):
    """A model behind an OpenAI-compatible server that scores finished completions.

    The reward is the place of the score between `lowest` and `highest`, from 0 to 1.
    """

    url: str = Field(pattern=r"^https?://\S+$", description="Of the server, such as http://host:8000/v1.")
    model: str = Field(min_length=1, description="The server's name of the model.")
    template: str = Field(description="The message; {question}, {answer}, {completion} and data.columns are replaced.")
    pattern: str = Field(
        r"(?i)score\W*?(-?\d+(?:\.\d+)?)", description="Regular expression; its group in the last match is the score."
    )
    lowest: float = Field(0.0, description="Lowest score; a lower one is `unparsed`.")
    highest: float = Field(1.0, description="Highest score; a higher one is `unparsed`.")
    right_from: float | None = Field(None, description="The score that counts as `right`; null: highest.")
    key_variable: str | None = Field(None, description="Name of the environment variable with the server's key.")
    max_tokens: int = Field(512, ge=1, le=1 << 20, description="Longest reply.")
    timeout_seconds: float = Field(60.0, gt=0, le=3600, description="Longest wait for a reply.")
    retries: int = Field(5, ge=0, le=20, description="After no reply or one with status 429 or 5xx; each waits longer.")
    concurrency: int = Field(16, ge=1, le=1024, description="Requests at the same time.")
    body: dict[str, JsonValue] = Field(
        default_factory=dict, description="Further fields of a request; null removes one, such as max_tokens."
    )

    @field_validator("url")
    @classmethod
    def _is_an_address_without_password(cls, url: str) -> str:
        if without_passwords(url) != url:
            raise ValueError("it has a password or a token, which run.json would show; use key_variable")
        try:
            parts = urlsplit(url)
            is_whole = bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_whole = False
        if not is_whole:
            raise ValueError(f"{url} is no address, such as http://host:8000/v1")
        return url.rstrip("/")

    @field_validator("template")
    @classmethod
    def _shows_the_completion(cls, template: str) -> str:
        if "completion" not in PLACEHOLDER.findall(template):
            raise ValueError("the text has no {completion}, so every score would be the same; add it")
        return template

    @field_validator("pattern")
    @classmethod
    def _has_one_group(cls, pattern: str) -> str:
        try:
            groups = re.compile(pattern).groups
        except re.error as error:
            raise ValueError(f"no regular expression: {error}") from error
        if groups != 1:
            raise ValueError(f"it has {groups} groups; put the score, and nothing else, into one: (...)")
        return pattern

    @field_validator("key_variable")
    @classmethod
    def _is_a_name(cls, name: str | None) -> str | None:
        # The message does not repeat what may be the key itself.
        if name is not None and re.fullmatch(r"[A-Z_][A-Z0-9_]*", name) is None:
            raise ValueError("it is no name of an environment variable (A-Z, 0-9 and _), such as JUDGE_KEY")
        return name

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> "JudgeOptions":
        if not self.lowest < self.highest:
            raise ValueError(f"lowest={self.lowest:g} is not below highest={self.highest:g}")
        if not self.lowest <= self.least_right <= self.highest:
            raise ValueError(f"right_from={self.right_from:g} is not from {self.lowest:g} to {self.highest:g}")
        return self

    @property
    def least_right(self) -> float:
        return self.highest if self.right_from is None else self.right_from


class RewardModelOptions(Section):
    """A sequence classifier of one label that scores prompt and completion in its own chat template."""

    model: UserSource = Field(min_length=1, description="Checkpoint: a Hugging Face folder or a hub id.")
    revision: str | None = Field(None, description="Commit of a hub model.")
    device: str = Field("cpu", pattern=r"^(cpu|cuda(:\d{1,3})?)$", description="cpu, cuda or one GPU, such as cuda:1.")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Of its weights and its arithmetic.")
    batch_size: int = Field(8, ge=1, le=65536, description="Completions that it scores together.")
    max_tokens: int = Field(4096, ge=1, le=1 << 20, description="A longer text loses its beginning.")
    sigmoid: bool = Field(False, description="Turn its score x into 1 / (1 + exp(-x)).")
    scale: float = Field(1.0, ge=-1e6, le=1e6, description="The reward is this times the score, plus `offset`.")
    offset: float = Field(0.0, ge=-1e6, le=1e6, description="Added to each reward.")


OPTIONS: Mapping[str, type[Section]] = {
    "format": FormatOptions,
    "judge": JudgeOptions,
    "reward_model": RewardModelOptions,
}
"""Shipped verifier -> the model of its options; others have none."""


class NamedVerifier(NamedTuple):
    """A verifier of a configuration, the section that has it and its options, and the data sources of its rows."""

    section: str
    name: str
    options: Mapping[str, JsonValue]
    sources: Collection[str]


class OtherVerifierConfig(Section):
    """A verifier beside `reward.verifier`, within the same limits."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]{0,39}$", description="Of its metric: reward/NAME.")
    verifier: Verifier = Field(description="As `reward.verifier`.")
    weight: float = Field(1.0, ge=-100, le=100, description="Times this its score is added to the reward.")
    options: dict[str, JsonValue] = Field(default_factory=dict, description=_OPTIONS_TEXT)

    @model_validator(mode="after")
    def _verifier_is_one(self) -> "OtherVerifierConfig":
        RewardConfig(verifier=self.verifier, options=self.options)
        return self


class RewardConfig(Section):
    verifier: Verifier = Field(
        "chain", description=f"{', '.join(SHIPPED_VERIFIERS)}; or your function, `module:name` or `file.py:name`."
    )
    options: dict[str, JsonValue] = Field(default_factory=dict, description=_OPTIONS_TEXT)
    others: list[OtherVerifierConfig] = Field(
        default_factory=list, max_length=16, description="Their weighted scores are added; outcomes are `verifier`'s."
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
        if (model := OPTIONS.get(self.verifier)) is not None:
            try:
                model.model_validate_json(json.dumps(self.options), strict=True)
            except ValidationError as error:
                raise ValueError(f"options: {refusal(error, model, self.options)}") from error
        elif self.options and self.verifier in SHIPPED_VERIFIERS:
            raise ValueError(f"options: verifier={self.verifier} takes none")
        return self
