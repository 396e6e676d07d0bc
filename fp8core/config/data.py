"""Settings of the data: rows of the user's own, or the generated task."""

from typing import Annotated, Literal

from pydantic import Discriminator, Field, JsonValue, Tag, field_validator, model_validator

from fp8core.config.reward import RewardConfig, Verifier
from fp8core.config.section import Section, UserSource

_QUESTION = "{question}"


class ChainTaskConfig(Section):
    """The generated task: `2*7*6+0+9=`, evaluated left to right, by default modulo 10."""

    min_operands: int = Field(5, ge=2, le=64, description="Fewest numbers in a chain.")
    max_operands: int = Field(5, ge=2, le=64, description="Above min_operands the prompts are ragged.")
    modulus: Literal[10, 100, 1000] = Field(10, description="Every result is taken modulo this.")
    operations: str = Field("+-*", pattern=r"^[-+*]{1,3}$", description="Operations that are drawn from, each once.")

    @property
    def digits(self) -> int:
        return len(str(self.modulus)) - 1

    @model_validator(mode="after")
    def _ordered(self) -> "ChainTaskConfig":
        if self.max_operands < self.min_operands:
            raise ValueError(f"max_operands={self.max_operands} is below min_operands={self.min_operands}")
        return self


class DataConfig(Section):
    source: UserSource = Field(
        "chain",
        min_length=1,
        description="`chain` (generated), a .jsonl, .jsonl.gz or .parquet file, or a Hugging Face dataset.",
    )
    chain: ChainTaskConfig = Field(default_factory=ChainTaskConfig)
    subset: str | None = Field(None, description="Configuration name of a Hugging Face dataset.")
    split: str = Field("train", description="Split of a Hugging Face dataset.")
    revision: str | None = Field(None, description="Commit of a Hugging Face dataset.")
    question_field: str = Field("question", min_length=1, description="Field of a row that holds the question.")
    answer_field: str = Field(
        "answer", min_length=1, description="Field with the answer; `reward_model.ground_truth` is one within another."
    )
    messages_field: str | None = Field(
        None, min_length=1, description="Field with a conversation instead of question_field; its last message asks."
    )
    columns: list[str] = Field(
        default_factory=list, max_length=100, description="Further fields, for `columns` of a verifier of your own."
    )
    unreadable: Literal["refuse", "skip"] = Field("refuse", description="Rows that the verifier cannot read.")
    template: str = Field(_QUESTION, description="Prompt text, inside the chat template; {question} alone is replaced.")
    system: str | None = Field(
        None, min_length=1, description="System prompt of the chat template, where a row brings none of its own."
    )
    chat: bool = Field(True, description="Apply the tokenizer's chat template when it has one.")
    template_arguments: dict[str, JsonValue] = Field(
        default_factory=dict, description="Variables of the chat template."
    )
    max_prompt_tokens: int = Field(512, ge=1, le=1 << 20, description="Longer prompts are an error with their line.")

    @property
    def prompt_form(self) -> tuple[object, ...]:
        """All that decides how a row becomes a prompt."""
        fields = (self.question_field, self.messages_field)
        return (*fields, self.template, self.system, self.chat, self.template_arguments)

    @model_validator(mode="after")
    def _messages_are_chat(self) -> "DataConfig":
        if self.source == "chain" and (self.messages_field is not None or self.columns):
            raise ValueError("messages_field and columns name fields of rows, which source=chain has not; set source")
        if self.messages_field is not None and not self.chat:
            raise ValueError(f"messages_field={self.messages_field} needs the chat template; set chat to true")
        if self.system is not None and not self.chat:
            raise ValueError("system needs the chat template; set chat to true")
        return self

    @field_validator("template")
    @classmethod
    def _holds_the_question(cls, template: str) -> str:
        if _QUESTION not in template:
            raise ValueError("the text has no {question}, so every prompt would be the same; add it where rows differ")
        return template


class SourceConfig(DataConfig):
    """One of a list of sources. It has the settings of `data`, and these."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]{0,39}$", description="Of its metrics: reward/source/NAME.")
    weight: float = Field(1.0, ge=1e-6, le=1e6, description="Share of the prompts, beside the weights of the others.")
    verifier: Verifier | None = Field(None, description="Of its rows; null: that of `reward`.")
    options: dict[str, JsonValue] = Field(default_factory=dict, description="Of `verifier`, as in `reward`.")
    heldout: UserSource | None = Field(
        None, min_length=1, description="File of its held-out rows; null holds out one prompt in eight."
    )

    @model_validator(mode="after")
    def _verifier_is_one(self) -> "SourceConfig":
        if self.verifier is not None:
            RewardConfig(verifier=self.verifier, options=self.options)
        elif self.options:
            raise ValueError("options are those of a verifier; set verifier, or reward.options")
        if self.source == "chain" and self.heldout is not None:
            raise ValueError("heldout: the chain task holds out prompts of its own; unset it")
        return self


Data = Annotated[
    Annotated[DataConfig, Tag("DataConfig")]
    | Annotated[list[SourceConfig], Field(min_length=1, max_length=32), Tag("SourceConfig")],
    Discriminator(lambda data: "SourceConfig" if isinstance(data, list) else "DataConfig"),
]


def data_key(source: str) -> str:
    """The key of a source's settings; a single one has no name."""
    return f"data.{source}" if source else "data"
