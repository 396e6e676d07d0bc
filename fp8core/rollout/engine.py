"""The interface of every rollout engine: token ids in, token ids and their log-probs out, weights replaced in place."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor

from fp8core.numerics.kv_scales import LayerScales
from fp8core.rollout.shared import SharedWeights, TensorSpec


@dataclass(frozen=True)
class PromptGroup:
    """One prompt and the seeds of its completions.

    Attributes:
        group: index of the prompt within the step.
        prompt_id: identity of the prompt across steps.
        prompt: token ids, at least one.
        samples: index of each completion within the group.
        seeds: signed 64-bit seed of each completion.
    """

    group: int
    prompt_id: str
    prompt: tuple[int, ...]
    samples: tuple[int, ...]
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class Sampling:
    """The rules by which tokens are chosen.

    Attributes:
        temperature: of the softmax that is sampled from; 0 is greedy (log-probs are then those of temperature 1).
        max_new_tokens: length limit.
        stop_ids: tokens that end a completion; the stop token is part of it.
        report_experts: whether completions carry the experts that a mixture of experts chose.
    """

    temperature: float
    max_new_tokens: int
    stop_ids: frozenset[int]
    report_experts: bool = False


@dataclass(frozen=True)
class Completion:
    """One rollout.

    Attributes:
        group: index of the prompt within the step.
        sample: index within the group.
        tokens: generated ids, the stop token included.
        logprobs: FP32 log-prob of each token under the distribution it was drawn from (nats).
        finish: `stop` or `length`.
        experts: when reported, int16 [positions, sparse layers, k], ascending; for every position the engine computed:
            those of the prompt, then those of the completion but its last token, which nothing follows. Completions
            are compared without them.
    """

    group: int
    sample: int
    tokens: list[int]
    logprobs: list[float]
    finish: Literal["stop", "length"]
    experts: Tensor | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Probe:
    """A known token after a known context, at most as many tokens as a prompt may have."""

    context: tuple[int, ...]
    target: int


@dataclass(frozen=True)
class PolicyScales:
    """Scales of Q, K and V of every layer, for one version of the policy; no layers when the cache is not FP8."""

    version: int
    layers: tuple[LayerScales, ...]


@dataclass(frozen=True)
class SyncReport:
    """The state of an engine after an update, read back from its own tensors."""

    version: int
    digest: str
    scales: PolicyScales


class RolloutEngine(Protocol):
    """A resident generator of completions."""

    def generate(self, groups: Sequence[PromptGroup], sampling: Sampling) -> Iterator[list[Completion]]:
        """Completions, whole groups as they finish."""
        ...

    def score(self, probes: Sequence[Probe], temperature: float) -> list[list[float]]:
        """FP32 log-prob (nats) of every probe's target, by the passes that generate; a row for each engine."""
        ...

    def update(self, tensors: Any, scales: PolicyScales, version: int) -> SyncReport:
        """Replace weights and scales and read them back; `tensors` are those of the trainer's `export`."""
        ...

    def fingerprint(self) -> str:
        """Digest of the weights the engine holds now."""
        ...

    def describe(self) -> dict[str, object]:
        """Report what really runs: formats by layer, dtype by parameter, scales."""
        ...

    def sleep(self) -> None:
        """Nothing is generated until the next update: an engine that shares a device may give its memory back."""
        ...

    def close(self) -> None:
        """Release memory."""
        ...


@runtime_checkable
class MemoryReader(RolloutEngine, Protocol):
    """An engine with a process of its own, which reads weights where another process of its machine has them."""

    def expect(self, sent: Mapping[str, TensorSpec], scales: PolicyScales, version: int) -> None:
        """The first half of `update`: refuse what does not fit; nothing is written."""
        ...

    def receive(self, shared: SharedWeights, scales: PolicyScales, version: int) -> SyncReport:
        """The second half: write the expected weights, which this or another process shares meanwhile."""
        ...


def sample_seed(run_seed: int, step: int, group: int, sample: int) -> int:
    """Signed 64-bit seed of one completion."""
    text = f"rollout/{run_seed}/{step}/{group}/{sample}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)
