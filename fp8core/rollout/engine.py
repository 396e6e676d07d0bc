"""The interface of every rollout engine: token ids in, token ids and their log-probs out, weights replaced in place."""

import hashlib
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, Literal, Protocol, Self, TypeVar, runtime_checkable

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from fp8core.errors import UserError
from fp8core.numerics.kv_scales import LayerScales
from fp8core.numerics.logprobs import Truncation

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class PromptGroup:
    """One prompt and the seeds of its completions.

    Attributes:
        group: index of the prompt within the step.
        prompt_id: identity of the prompt across steps.
        prompt: token ids, at least one.
        samples: index of each completion within the group.
        seeds: signed 64-bit seed of each completion.
        begun: tokens that each completion has already, which it goes on from; nothing where none has any.
        room: tokens that each may write now, at least one; nothing where only `Sampling.max_new_tokens` limits them.
    """

    group: int
    prompt_id: str
    prompt: tuple[int, ...]
    samples: tuple[int, ...]
    seeds: tuple[int, ...]
    begun: tuple[tuple[int, ...], ...] = ()
    room: tuple[int, ...] = ()

    def begun_of(self, i: int) -> tuple[int, ...]:
        """Tokens that completion `i` has already."""
        return self.begun[i] if self.begun else ()

    def context(self, i: int) -> tuple[int, ...]:
        """Prompt and begun tokens of completion `i`."""
        return (*self.prompt, *self.begun_of(i))

    def room_of(self, i: int, max_new_tokens: int) -> int:
        """Tokens that completion `i` may write now."""
        rest = max_new_tokens - len(self.begun_of(i))
        return min(rest, self.room[i]) if self.room else rest

    def without(self, known: Collection[int]) -> Self:
        """The group without some of its samples; it may have none left."""
        left = [i for i, sample in enumerate(self.samples) if sample not in known]

        def of(values: tuple[_Value, ...]) -> tuple[_Value, ...]:
            return tuple(values[i] for i in left) if values else ()

        return replace(self, samples=of(self.samples), seeds=of(self.seeds), begun=of(self.begun), room=of(self.room))


@dataclass(frozen=True)
class Sampling:
    """The rules by which tokens are chosen.

    Attributes:
        temperature: of the softmax that is sampled from; 0 is greedy (log-probs are then those of temperature 1).
        max_new_tokens: length limit.
        stop_ids: tokens that end a completion; the stop token is part of it.
        report_experts: whether completions carry the experts that a mixture of experts chose.
        truncation: what is left of the tempered distribution, from which tokens and their log-probs are then.
    """

    temperature: float
    max_new_tokens: int
    stop_ids: frozenset[int]
    report_experts: bool = False
    truncation: Truncation | None = None


Finish = Literal["stop", "length", "stop_string", "open", "turns", "observation"]


def finish_of(tokens: Sequence[int], begun: int, sampling: Sampling) -> Finish:
    """Of a completion that writes no more: a stop token ends it also where it is the last that it may have.

    Args:
        tokens: what it wrote now, at least one.
        begun: the number of tokens that it had before.
        sampling: the rules.
    """
    if tokens[-1] in sampling.stop_ids:
        return "stop"
    return "length" if begun + len(tokens) == sampling.max_new_tokens else "open"


@dataclass(frozen=True)
class Completion:
    """One rollout.

    Attributes:
        group: index of the prompt within the step.
        sample: index within the group.
        tokens: generated ids, the stop token included; of one that was begun, those that are new.
        logprobs: FP32 log-prob of each token under the distribution it was drawn from (nats).
        finish: `stop`, `length`, of what was cut after a stop string `stop_string`, of what had no more room `open`.
            Of an episode that its environment did not end also `turns` and `observation` (`rollout.episodes`).
        experts: when reported, int16 [positions, sparse layers, k], ascending; for every position the engine computed:
            those of the prompt, then those of the completion but its last token, which nothing follows. Completions
            are compared without them.
        written: of an episode of several turns, which tokens the policy wrote, as many as `tokens`; the others are its
            environment's, with a log-prob of 0. None: it wrote them all.
    """

    group: int
    sample: int
    tokens: list[int]
    logprobs: list[float]
    finish: Finish
    experts: Tensor | None = field(default=None, compare=False)
    written: list[bool] | None = None

    @property
    def length(self) -> int:
        """Tokens that the policy wrote."""
        return len(self.tokens) if self.written is None else sum(self.written)

    def rest(self, before: int) -> "Completion":
        """The part after so many tokens, without experts."""
        written = None if self.written is None else self.written[before:]
        tokens, logprobs = self.tokens[before:], self.logprobs[before:]
        return replace(self, tokens=tokens, logprobs=logprobs, experts=None, written=written)


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
        """Report what really runs, read anew.

        Returns:
            `linear` (a format a layer), `attention`, `head`, `scale_rule` and `rounding_points` in the words of the
            contract, which each sync compares. Further keys are recorded.
        """
        ...

    def sleep(self) -> None:
        """Nothing is generated until the next update: an engine that shares a device may give its memory back."""
        ...

    def close(self) -> None:
        """Release memory."""
        ...


class Session(Protocol):
    """Requests in flight, to which others are added between steps; what they give depends on none of the others."""

    @property
    def busy(self) -> bool:
        """True while a request is in flight or waits."""
        ...

    def add(self, groups: Sequence[PromptGroup]) -> None:
        """Further requests; several groups may have one number, as long as none of their samples is in flight."""
        ...

    def step(self) -> list[Completion]:
        """Move all of them by one token or so: the completions that are finished now, in any order."""
        ...

    def close(self) -> None:
        """Drop what is in flight."""
        ...


@runtime_checkable
class StreamingEngine(RolloutEngine, Protocol):
    """An engine that takes requests while others are in flight, as episodes of several turns need it."""

    def open_session(self, sampling: Sampling) -> Session:
        """Nothing else may be asked of the engine until the session is closed."""
        ...


def sample_seed(run_seed: int, step: int, group: int, sample: int) -> int:
    """Signed 64-bit seed of one completion."""
    text = f"rollout/{run_seed}/{step}/{group}/{sample}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)


def check_scales(scales: PolicyScales, version: int, needed: int) -> None:
    """Refuse scales that do not fit the weights they are sent with; `needed` layers have some, 0: nothing needs them.

    Raises:
        ValueError: they are of another version, or of another number of layers.
    """
    if scales.version != version:
        raise ValueError(f"scales of policy {scales.version} sent with weights of policy {version}")
    if needed and len(scales.layers) != needed:
        raise ValueError(f"{len(scales.layers)} layers have scales, the model has {needed}")


def check_lengths(groups: Sequence[PromptGroup], max_new_tokens: int, setting: str, longest: int) -> None:
    """Raises UserError where a prompt with its completion may be longer than `longest`, the tokens of `setting`."""
    for group in groups:
        length = len(group.prompt) + max_new_tokens
        if length > longest:
            raise UserError(
                f"prompt {group.prompt_id}: {len(group.prompt)} tokens and rollout.max_new_tokens={max_new_tokens} are "
                f"{length}, {setting} is {longest}"
            )


@dataclass(frozen=True)
class TensorSpec:
    """dtype (without `torch.`) and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorSpec":
        return cls(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    @property
    def rows(self) -> int:
        """Rows, through all experts where there are any."""
        return prod(self.shape[:-1]) if len(self.shape) > 2 else self.shape[0]

    @property
    def row(self) -> tuple[int, ...]:
        """Shape of one row."""
        return self.shape[-1:] if len(self.shape) > 2 else self.shape[1:]

    @property
    def bytes(self) -> int:
        """Bytes of its elements."""
        form: torch.dtype = getattr(torch, self.dtype)
        return prod(self.shape) * form.itemsize

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def specs_of(tensors: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    """The specs of the sent tensors, by name."""
    return {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}


RECEIVED_BYTES = 1 << 30
"""What an engine on GPUs of its own receives of a policy at a time, unless a single tensor is larger."""
SharedWeights = dict[str, Any]
# Fields of torch's rebuild function that cannot travel as they are, and others by their place.
_TENSOR_CLASS, _STORAGE_CLASS, _DTYPE, _DEVICE = 0, 4, 5, 6
_COUNTER, _WAITS_FOR_EVENT = slice(-4, -2), -1


@runtime_checkable
class MemoryReader(RolloutEngine, Protocol):
    """An engine with a process of its own, which reads weights where another process of its machine has them."""

    def expect(self, sent: Mapping[str, TensorSpec], scales: PolicyScales, version: int) -> None:
        """`update` begins: refuse what does not fit; nothing is written."""
        ...

    def write(self, shared: SharedWeights) -> None:
        """Write some of the expected weights, which this or another process shares meanwhile; once or more."""
        ...

    def finish(self, scales: PolicyScales, version: int) -> SyncReport:
        """`update` ends, when all expected weights are written: set the scales and read everything back."""
        ...

    def await_loss(self) -> str | None:
        """Wait for the end of the engine's own process, in a thread: how it ended, None after `close`."""
        ...


@contextmanager
def share_weights(tensors: Mapping[str, Tensor]) -> Iterator[SharedWeights]:
    """Tensors in a form that `open_shared` opens in any number of other processes, while the block lasts."""
    if all(tensor.is_cuda for tensor in tensors.values()):
        shared, counters = _shared_storages(tensors)
        # The tensors are complete, so that no reader waits for an event of a GPU that it may not see.
        for device in {tensor.device for tensor in tensors.values()}:
            torch.cuda.synchronize(device)
        try:
            yield shared
        finally:
            for counter in counters:
                torch.UntypedStorage._release_ipc_counter(*counter)
            torch.cuda.ipc_collect()
        return
    with tempfile.TemporaryDirectory(prefix="fp8-grpo-") as folder:
        path = Path(folder) / "policy.safetensors"
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
        yield {"file": str(path)}


class _FileTensors(Mapping[str, Tensor]):
    """Tensors of a safetensors file on a device, each read when it is asked for."""

    def __init__(self, file: str, device: torch.device) -> None:
        opened: Any = safe_open
        self._opened = opened(file, framework="pt", device=str(device))

    def __getitem__(self, name: str) -> Tensor:
        found: Tensor = self._opened.get_tensor(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._opened.keys())

    def __len__(self) -> int:
        return len(self._opened.keys())


def open_shared(received: SharedWeights, device: torch.device) -> Mapping[str, Tensor]:
    """The shared tensors by name, to be used within the sender's block."""
    if "file" in received:
        return _FileTensors(received["file"], device)
    storages = [_open_storage(fields, device) for fields in received["storages"]]
    return {name: _view(storages[place[0]], *place[1:]) for name, place in received["tensors"].items()}


def _shared_storages(tensors: Mapping[str, Tensor]) -> tuple[SharedWeights, list[tuple[Any, ...]]]:
    """Places that readers open, and counters: torch keeps the memory until each of them is released once."""
    index: dict[int, int] = {}
    storages: list[list[Any]] = []
    counters: list[tuple[Any, ...]] = []
    places: dict[str, list[Any]] = {}
    for name, tensor in tensors.items():
        assert tensor.is_contiguous(), f"{name} is not contiguous"
        storage = tensor.detach().untyped_storage()
        if storage.data_ptr() not in index:
            index[storage.data_ptr()] = len(storages)
            fields, counter = _handle(tensor)
            storages.append(fields)
            counters.append(counter)
        spec = TensorSpec.of(tensor)
        offset = tensor.storage_offset() * tensor.element_size()
        places[name] = [index[storage.data_ptr()], spec.dtype, list(spec.shape), offset]
    return {"storages": storages, "tensors": places}, counters


def _handle(tensor: Tensor) -> tuple[list[Any], tuple[Any, ...]]:
    """IPC fields of the whole storage of a tensor, as bytes, and its counter.

    torch expects one reader to release the counter: two would take an unsigned number below 0, and one that is killed
    leaves it. So readers get the counter of nothing, and the sender releases this one.
    """
    storage = tensor.detach().untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))
    _, fields = reduce_tensor(whole)
    sent = list(fields)
    sent[_COUNTER] = _counter_of_nothing()[1]
    for place in (_TENSOR_CLASS, _STORAGE_CLASS, _DTYPE):
        sent[place] = None
    sent[_WAITS_FOR_EVENT] = False
    return [list(field) if isinstance(field, tuple) else field for field in sent], fields[_COUNTER]


@cache
def _counter_of_nothing() -> tuple[Tensor, tuple[Any, ...]]:
    """A byte that lives as long as this process, and its counter."""
    nothing = torch.empty(1, dtype=torch.uint8, device="cuda")
    return nothing, reduce_tensor(nothing)[1][_COUNTER]


def _open_storage(fields: list[Any], device: torch.device) -> Tensor:
    """uint8 [bytes], the sender's memory."""
    opened = [tuple(field) if isinstance(field, list) else field for field in fields]
    opened[_TENSOR_CLASS], opened[_STORAGE_CLASS], opened[_DTYPE] = Tensor, torch.storage.TypedStorage, torch.uint8
    # The same GPU may have another number in the process that trains; of another GPU the memory is mapped into ours.
    opened[_DEVICE] = device.index
    whole: Tensor = rebuild_cuda_tensor(*opened)
    return whole


def _view(storage: Tensor, dtype: str, shape: list[int], offset: int) -> Tensor:
    form: torch.dtype = getattr(torch, dtype)
    size = prod(shape) * form.itemsize
    return storage[offset : offset + size].view(form).view(shape)
