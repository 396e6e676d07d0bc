"""The base of every configuration section, pydantic's refusals as one line, and the sections of single parts.

Settings of the cluster decide speed and memory; formats belong to the precision contract. Those of parity are the
bounds of its verdict.
"""

import difflib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from fp8core.errors import UserError

SAME_SPEED: Final = "same speed"
"""Metadata of an engine's setting that does not change the time of a step."""


UserPath = Annotated[Path, AfterValidator(lambda path: Path(os.path.expanduser(path)))]
"""A path of this machine; `~/` is the user's home folder, as in a shell."""
UserSource = Annotated[str, AfterValidator(os.path.expanduser)]
"""A file, likewise, or a name."""


class Section(BaseModel):
    """A frozen group of settings; an unknown key or a wrong type is refused when it is read."""

    # An infinite number could not be read back from a run.json.
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)


def suggestion(word: str, known: Iterable[str]) -> str:
    """A correction for an unknown word: a close match, else all that is known."""
    choices = list(known)
    close = difflib.get_close_matches(word, choices, n=1)
    if close:
        return f"did you mean {close[0]}?"
    return f"known here: {', '.join(choices)}" if choices else "none is known here"


def refusal(
    error: ValidationError,
    model: type[BaseModel],
    given: Mapping[str, Any],
    prefix: str = "",
    places: Mapping[str, str] | None = None,
) -> UserError:
    """Pydantic's errors about `given` as one line: the first mistake, where it was written, how many more there are.

    `places` maps dotted keys to the file and line, or the override, that set them.
    """
    # A misspelt key also leaves its field missing: the spelling is the mistake to report.
    details = sorted(error.errors(include_url=False), key=lambda item: item["type"] != "extra_forbidden")
    keys = [_dotted(item, given) for item in details]
    key, first = keys[0], details[0]
    place = ".".join(part for part in (prefix, key) if part)
    origin = (places or {}).get(key)
    reason = _reason(first, model)
    if first["type"] == "string_type":
        # A shell takes one pair of quotes for itself. The text of a mapping or a list is not known.
        text = "..." if isinstance(first["input"], dict | list) else _shown(first["input"])
        quoted = f"write --set '{place}=\"{text}\"'" if origin == "--set" else "quote it"
        reason += f"; {quoted} to make it a string"
    if first["type"] == "missing" and place == "pipeline":
        reason += "; a configuration has it from its base, as in `base: tiny`"
    line = (f"{place}: " if place else "") + reason
    more = len(set(keys)) - 1
    return UserError(line + (f" ({origin})" if origin else "") + (f" (and {more} more)" if more else ""))


def _dotted(error: ErrorDetails, given: Mapping[str, Any]) -> str:
    """The key as a user writes it: steps by name, without the branches of unions that pydantic adds."""
    parts: list[str] = []
    value: Any = given
    for part in error["loc"]:
        if isinstance(part, int) and isinstance(value, list):
            value = value[part]
            parts.append(step_name(value) or str(part))
        elif isinstance(value, Mapping) and part in value:
            value = value[str(part)]
            parts.append(str(part))
    if error["type"] == "missing":
        parts.append(str(error["loc"][-1]))
    return ".".join(parts)


def step_name(item: Any) -> str | None:
    """The name of an item of a list of steps."""
    name = item.get("name") if isinstance(item, Mapping) else None
    return name if isinstance(name, str) else None


def _reason(error: ErrorDetails, model: type[BaseModel]) -> str:
    if error["type"] == "extra_forbidden":
        word = str(error["loc"][-1])
        if elsewhere := [*_places(model, word)]:
            return f"unknown key; did you mean {' or '.join(elsewhere)}?"
        return f"unknown key; {suggestion(word, _known_keys(model, error['loc'][:-1]))}"
    if error["type"] == "missing":
        return "missing"
    if error["type"] == "value_error":
        return error["msg"].removeprefix("Value error, ")
    wanted = error["msg"].partition(" should ")[2] or error["msg"]
    wanted = wanted.replace("an object", "a mapping").replace("a valid array", "a list")
    return f"must {wanted}, got {_shown(error['input'])}"


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _known_keys(model: type[BaseModel], section: Sequence[int | str]) -> list[str]:
    for part in section:
        nested = [
            _model_in(info.annotation) for name, info in model.model_fields.items() if part == (info.alias or name)
        ]
        model = next((found for found in nested if found is not None), model)
    return [info.alias or name for name, info in model.model_fields.items()]


def _places(model: type[BaseModel], word: str, prefix: str = "") -> Iterator[str]:
    """The dotted keys that end in a word, in all sections."""
    for name, info in model.model_fields.items():
        key = f"{prefix}{info.alias or name}"
        if word == (info.alias or name):
            yield key
        if (nested := _model_in(info.annotation)) is not None:
            yield from _places(nested, word, f"{key}.")


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for found in map(_model_in, get_args(annotation)) if found is not None), None)


class ClusterConfig(Section):
    """Processes of engines and trainer ranks. One of each, colocated, without an address, lie in the run's process."""

    address: str | None = Field(
        None,
        pattern=r"^(auto|[^\s:/@]+:\d{1,5})$",
        description="Ray cluster: HOST:PORT of its head, or auto for the one that this machine belongs to. null starts "
        "one on this machine, for more than one engine or rank, or separate ones, and ends it with the command.",
    )
    placement: Literal["colocated", "separate"] = Field(
        "colocated",
        description="colocated: engine i and rank i share a GPU in turn. separate: each has a GPU of its own.",
    )
    engines: int = Field(1, ge=1, le=4096, description="Rollout engines; prompts are shared out among them.")
    ranks: int = Field(1, ge=1, le=4096, description="Processes that train one policy together.")
    start_seconds: float = Field(
        180.0, gt=0, le=86_400, description="Time for the cluster to give the processes their places."
    )
    answer_seconds: float = Field(
        3600.0,
        gt=0,
        le=86_400,
        description="Longest wait for an answer of a process: an update, or the next completions. It is lost then.",
    )
    replacements: int = Field(
        3,
        ge=0,
        le=1000,
        description="How often a process that was lost is replaced, with all others, before a run fails.",
    )

    @property
    def used(self) -> bool:
        """True if engines and ranks are processes of their own."""
        several = self.engines > 1 or self.ranks > 1 or self.placement == "separate"
        return self.address is not None or several

    def bundles(self, tensor_parallel: int) -> list[int]:
        """GPUs, or places on a CPU, of each part of a host: separate ranks first, then engines of so many GPUs each."""
        if self.placement == "colocated":
            return [1] * max(self.engines, self.ranks)
        return [1] * self.ranks + [tensor_parallel] * self.engines

    def too_small(self, tensor_parallel: int, unit: str, found: str) -> str:
        """The refusal of a place with fewer GPUs, or processors, than the sum of `bundles`."""
        shared = f", {tensor_parallel} {unit}s an engine" if tensor_parallel > 1 else ""
        asked = f"cluster.engines={self.engines}, ranks={self.ranks}, placement={self.placement}{shared}"
        return f"{asked}: {sum(self.bundles(tensor_parallel))} {unit}s are needed, {found}"


class Limit(Section):
    """A bound, and why it is where it is; the report shows both."""

    limit: float = Field(description="The bound itself.")
    reason: str = Field(min_length=1, description="Why it is there, for the report.")


class ParityConfig(Section):
    """Bounds of the verdict. Metrics are judged at the worst step of the worst seed of a variant, or as they say."""

    seeds: int = Field(
        12, ge=1, le=100, description="Trainings of each variant, with seeds from 0, where no seeds are named."
    )
    confidence: float = Field(0.95, gt=0, lt=1, description="Of the intervals.")
    last_evaluations: int = Field(3, ge=1, le=1000, description="Held-out evaluations that count as the end.")
    accuracy_gap: Limit = Field(
        Limit(
            limit=0.025,
            reason="half of the 5 points that make another policy: as far from 5 as from none",
        ),
        description="Held-out accuracy that a variant may lose to BF16 as the mean of its curve; judged by the "
        "interval over seeds and prompts.",
    )
    end_gap: Limit = Field(
        Limit(
            limit=0.05, reason="a policy that ends 5 points worse broke late; a few evaluations tell less than all do"
        ),
        description="Held-out accuracy that a variant may lose to BF16 in its last evaluations; judged alike.",
    )
    reach: float = Field(
        0.9, gt=0, le=1, description="Held-out accuracy from which BF16 is at its ceiling and delays are judged."
    )
    delay: Limit = Field(
        Limit(
            limit=0.125,
            reason="half of the quarter more steps that make slower learning; at its ceiling accuracy shows none of it",
        ),
        description="Steps that a variant may need beyond BF16's to reach `reach`, as a share of BF16's; judged by the "
        "interval over seeds.",
    )
    error_matched: Limit = Field(
        Limit(
            limit=1.0,
            reason="the embedded engine and its trainer compute alike, bit for bit (docs/concepts/exactness.md)",
        ),
        description="Largest token multiplicative probability error where both sides have the same formats.",
    )
    error_mismatched: Limit = Field(
        Limit(limit=1.1, reason="NeMo RL judges its nightly FP8 runs by it (docs/guides/grpo.md there)"),
        description="Largest token multiplicative probability error where the sides differ.",
    )
    k3: Limit = Field(
        Limit(limit=1e-3, reason="NeMo RL calls KL errors below it acceptable (docs/adding-new-models.md there)"),
        description="Largest k3 estimate of KL(rollout, training) in nats.",
    )
    effective_sample_size: Limit = Field(
        Limit(limit=0.95, reason="weights that waste one token in twenty slow training more than FP8 speeds it up"),
        description="Smallest effective sample size of the truncated weights, as a share of the tokens.",
    )
    mean_weight: Limit = Field(
        Limit(limit=0.01, reason="raw importance weights average 1 whatever the policies; a wrong sign does not"),
        description="Largest distance from 1 of the mean raw importance weight; the interval is over steps and seeds.",
    )
    step_weight: Limit = Field(
        Limit(limit=2.0, reason="weights that average 1 do not reach this over the tokens of a step by chance"),
        description="Largest mean raw importance weight of one step.",
    )
    speed_ratio: Limit = Field(
        Limit(limit=1.0, reason="FP8 generation that is no faster than BF16 is not worth its errors"),
        description="Smallest ratio of generated tokens per second to BF16; on a GPU only: a CPU emulates FP8.",
    )
    memory_slope: Limit = Field(
        Limit(limit=2.0, reason="2 MiB a step are 2 GiB in a thousand steps: a leak that ends long trainings"),
        description="Largest growth of memory in MiB a step in the second half of a training, median of seeds.",
    )
