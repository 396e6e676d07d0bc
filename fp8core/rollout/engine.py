"""The interface of every rollout engine: token ids in, token ids and their log-probs out, weights replaced in place."""

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, Self, TypeVar, runtime_checkable

from torch import Tensor

from fp8core.environments.protocol import TurnRecord
from fp8core.numerics.kv_scales import LayerScales
from fp8core.numerics.truncation import Truncation
from fp8core.rewards.scorer import Key
from fp8core.rollout.shared_weights import SharedWeights, TensorSpec

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class PromptGroup:
    """One prompt and the seeds of its completions.

    Attributes:
        prompt: token ids, at least one.
        samples: index of each completion within the group.
        seeds: signed 64-bit seed of each completion.
        prefix_tokens: tokens that each completion has already; nothing where none has any.
        max_tokens: tokens that each may write now, at least one; nothing where `Sampling.max_new_tokens` alone limits.
    """

    group: int
    prompt_id: str
    prompt: tuple[int, ...]
    samples: tuple[int, ...]
    seeds: tuple[int, ...]
    prefix_tokens: tuple[tuple[int, ...], ...] = ()
    max_tokens: tuple[int, ...] = ()

    def prefix_of(self, i: int) -> tuple[int, ...]:
        return self.prefix_tokens[i] if self.prefix_tokens else ()

    def context(self, i: int) -> tuple[int, ...]:
        return (*self.prompt, *self.prefix_of(i))

    def max_tokens_of(self, i: int, max_new_tokens: int) -> int:
        rest = max_new_tokens - len(self.prefix_of(i))
        return min(rest, self.max_tokens[i]) if self.max_tokens else rest

    def without(self, known: Collection[int]) -> Self:
        places = [i for i, sample in enumerate(self.samples) if sample not in known]

        def of(values: tuple[_Value, ...]) -> tuple[_Value, ...]:
            return tuple(values[i] for i in places) if values else ()

        return replace(
            self,
            samples=of(self.samples),
            seeds=of(self.seeds),
            prefix_tokens=of(self.prefix_tokens),
            max_tokens=of(self.max_tokens),
        )


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 is greedy, with log-probs of temperature 1; a stop token is part of its completion."""

    temperature: float
    max_new_tokens: int
    stop_ids: frozenset[int]
    report_experts: bool = False
    truncation: Truncation | None = None


Finish = Literal["stop", "length", "stop_string", "open", "turns", "observation"]


def finish_of(tokens: Sequence[int], prefix_length: int, sampling: Sampling) -> Finish:
    """A stop token ends a completion also where it is the last that it may have."""
    if tokens[-1] in sampling.stop_ids:
        return "stop"
    return "length" if prefix_length + len(tokens) == sampling.max_new_tokens else "open"


@dataclass
class Completion:
    """A completion: an episode of one turn, or of several with an environment; complete or in flight.

    An engine sets the fields up to `experts`, with the tokens that are new.

    Attributes:
        tokens: all after the prompt, the stop token included.
        logprobs: FP32 log-prob of each token under the distribution it was drawn from (nats).
        finish: `stop_string` of what was cut after one, `open` of what goes on later; `turns`, `observation` of an
            episode that its environment did not end.
        experts: when reported, int16 [positions, sparse layers, k], ascending; of all positions but the last.
        policy_mask: which tokens the policy wrote; its environment wrote the others. None: it wrote them all.
        prompt_tokens: the environment's first messages, or the group's prompt where it said none.
        batch: step of the prompt.
        versions: of each token, that of the policy that wrote it.
        ended: tick of the stream at which the last token was written (`run.stream`).
        turns: with an environment, turn 0 and those that are answered.
    """

    group: int
    sample: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: Finish = "open"
    experts: Tensor | None = field(default=None, compare=False)
    policy_mask: list[bool] | None = None
    prompt_id: str = ""
    seed: int = 0
    prompt_tokens: list[int] = field(default_factory=list)
    batch: int = 0
    versions: list[int] = field(default_factory=list)
    ended: int = 0
    turns: list[TurnRecord] = field(default_factory=list)

    @classmethod
    def of_row(cls, row: Mapping[str, Any], experts: Tensor | None = None) -> "Completion":
        """From a row of kind `stream`, as `row` gives it."""
        values = {**row, "finish": row["finish"] or "open", "experts": experts}
        written = values.pop("written", [])
        values["policy_mask"] = None if all(written) else written
        values["turns"] = [TurnRecord(**turn) for turn in row.get("turns", ())]
        return cls(**values)

    def row(self) -> dict[str, Any]:
        """Columns of kinds `rollouts` and `stream`, of which no table has all; the finish is empty in flight."""
        written = [True] * len(self.tokens) if self.policy_mask is None else self.policy_mask
        turns = [vars(turn) for turn in self.turns]
        return {**vars(self), "finish": "" if self.in_flight else self.finish, "written": written, "turns": turns}

    def anew(self) -> "Completion":
        """Of the same prompt and seed, with nothing written."""
        row = Completion(self.group, self.sample, prompt_id=self.prompt_id, seed=self.seed, batch=self.batch)
        row.prompt_tokens = self.prompt_tokens
        return row

    @property
    def key(self) -> Key:
        return self.group, self.sample

    @property
    def in_flight(self) -> bool:
        return self.finish == "open"

    @property
    def length(self) -> int:
        """Tokens that the policy wrote."""
        return len(self.tokens) if self.policy_mask is None else sum(self.policy_mask)

    def part(self, begin: int, end: int | None = None) -> "Completion":
        mask = None if self.policy_mask is None else self.policy_mask[begin:end]
        return replace(self, tokens=self.tokens[begin:end], logprobs=self.logprobs[begin:end], policy_mask=mask)


@dataclass(frozen=True)
class Probe:
    context: tuple[int, ...]
    target: int


@dataclass(frozen=True)
class PolicyScales:
    """Scales of Q, K and V by layer; no layers when the cache is not FP8."""

    version: int
    layers: tuple[LayerScales, ...]


@dataclass(frozen=True)
class SyncReport:
    version: int
    digest: str
    scales: PolicyScales


class RolloutEngine(Protocol):
    def generate(self, groups: Sequence[PromptGroup], sampling: Sampling) -> Iterator[list[Completion]]: ...

    def score(self, probes: Sequence[Probe], temperature: float) -> list[list[float]]:
        """FP32 log-prob (nats) of every probe's target in the whole distribution, by the passes that generate; a row
        for each engine."""

    def update(self, tensors: Any, scales: PolicyScales, version: int) -> SyncReport:
        """`tensors` are those of the trainer's `export`."""

    def fingerprint(self) -> str: ...

    def describe(self) -> dict[str, object]:
        """Report what really runs, read anew.

        Returns:
            `linear` (a format a layer), `attention`, `head`, `scale_rule` and `rounding_points` in the words of the
            contract, which each sync compares. Further keys are recorded.
        """

    def sleep(self) -> None:
        """An engine that shares a device may give its memory back until the next update."""

    def close(self) -> None: ...


class Session(ABC):
    """Requests in flight; what they give depends on none of the others."""

    @property
    @abstractmethod
    def busy(self) -> bool: ...

    @abstractmethod
    def add(self, groups: Sequence[PromptGroup]) -> None:
        """Several groups may have one number, as long as none of their samples is in flight."""

    @abstractmethod
    def step(self) -> list[Completion]:
        """Move all by one token or so: the completions that are finished now, in any order."""

    @abstractmethod
    def close(self) -> None: ...

    def generate(self, groups: Sequence[PromptGroup]) -> Iterator[list[Completion]]:
        """Whole groups, until the session ends."""
        open_: dict[int, list[Completion]] = {group.group: [] for group in groups}
        sizes = {group.group: len(group.seeds) for group in groups}
        with closing(self):
            self.add(groups)
            while self.busy:
                group_parts = list[Completion]()
                for completion in self.step():
                    completions = open_[completion.group]
                    completions.append(completion)
                    if len(completions) == sizes[completion.group]:
                        group_parts += sorted(open_.pop(completion.group), key=lambda each: each.sample)
                if group_parts:
                    yield group_parts


@runtime_checkable
class StreamingEngine(RolloutEngine, Protocol):
    """An engine that takes requests while others are in flight."""

    def open_session(self, sampling: Sampling) -> Session:
        """Nothing else may be asked of the engine meanwhile."""


@runtime_checkable
class SpeculatingEngine(RolloutEngine, Protocol):
    """An engine that checks drafts (`rollout.drafts`)."""

    def draft_counts(self) -> Counter[str]:
        """`Drafts.counts`; empty without speculation."""


def draft_counts(engine: RolloutEngine) -> Counter[str]:
    return engine.draft_counts() if isinstance(engine, SpeculatingEngine) else Counter()


def sample_seed(run_seed: int, step: int, group: int, sample: int) -> int:
    text = f"rollout/{run_seed}/{step}/{group}/{sample}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)


def check_scales(scales: PolicyScales, version: int, needed: int) -> None:
    """Raises ValueError: scales are of another version, or of other layers than the `needed` ones (0: any)."""
    if scales.version != version:
        raise ValueError(f"scales of policy {scales.version} sent with weights of policy {version}")
    if needed and len(scales.layers) != needed:
        raise ValueError(f"{len(scales.layers)} layers have scales, the model has {needed}")


@runtime_checkable
class MemoryReader(RolloutEngine, Protocol):
    """An engine with a process of its own, which reads weights in the memory of another process."""

    def expect(self, specs: Mapping[str, TensorSpec], scales: PolicyScales, version: int) -> None:
        """Refuse what does not fit."""

    def write(self, weights: SharedWeights) -> None: ...

    def finish(self, scales: PolicyScales, version: int) -> SyncReport:
        """`update` ends: set the scales and read everything back."""
