"""An engine whose model stays in processes of its own, which start without weights.

Weights are written in place and read back, so that what generates is proved to be what was sent (`tasks.sync`).
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import count
from math import nan
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from fp8core.config.precision import PrecisionContract
from fp8core.errors import EngineLost, UserError
from fp8core.models.architecture import Architecture
from fp8core.numerics.fingerprint import PolicyRows, hex_digits
from fp8core.numerics.truncation import Truncation
from fp8core.rollout.aligned import is_aligned
from fp8core.rollout.engine import (
    Completion,
    PolicyScales,
    Probe,
    PromptGroup,
    Sampling,
    Session,
    SyncReport,
    check_scales,
    finish_of,
)
from fp8core.rollout.shared_weights import SharedWeights, TensorSpec, share_weights, specs_of
from fp8core.rollout.slots import EngineUpdateError, Share, Shares, written_scales

SEED_BITS = (1 << 63) - 1
"""The bits of a completion's seed that an engine gets."""
_Value = TypeVar("_Value")


class Request(NamedTuple):
    """One completion, or the log-prob of `target` after the tokens; `prefix_length` of these are its own."""

    tokens: tuple[int, ...]
    temperature: float
    max_tokens: int = 1
    seed: int = 0
    prefix_length: int = 0
    stop_ids: frozenset[int] = frozenset()
    target: int | None = None
    truncation: Truncation | None = None


class Output(NamedTuple):
    """`target`: its token and log-prob."""

    tokens: list[int]
    logprobs: list[float]
    reason: str
    target: tuple[int, float] | None = None
    experts: Any = None


class ResidentEngine(ABC):
    """Holds one policy: nothing, then `expect`, `write` once or more, `finish`, until it sleeps or expects another."""

    product: ClassVar[str]

    def __init__(
        self, arch: Architecture, contract: PrecisionContract, *, lowest: float, sleeps: bool, routes: bool
    ) -> None:
        """`lowest`: temperature above 0 that it samples at. `sleeps`: whether `sleep` gives memory back. `routes`:
        whether chosen experts can be reported."""
        self._arch = arch
        self._contract = contract
        self._lowest = lowest
        self._sleeps = sleeps
        self._routes = routes
        self._fp8_cache = contract.rollout.kv_cache == "fp8"
        self._numbers = count()
        self._parameters: dict[str, TensorSpec] = {}
        self._specs: dict[str, TensorSpec] = {}
        self._rows = PolicyRows({})
        # Where the parameters hold what is sent, as its processes take it; None where they have it already.
        self._places: Shares | None = None
        # Each process has rows of its own: true or false for each tensor.
        self._in_parts: list[bool] = []
        self._unwritten: set[str] = set()
        self._complete = False
        self._asleep = False

    def update(self, tensors: Mapping[str, Tensor], scales: PolicyScales, version: int) -> SyncReport:
        """Raises EngineUpdateError: weights do not fit."""
        self.expect(specs_of(tensors), scales, version)
        if self._asleep:
            # Both share a device: memory that torch caches in this process would be missing in the worker.
            torch.cuda.empty_cache()
        with share_weights(tensors) as shared:
            self.write(shared)
            return self.finish(scales, version)

    def expect(self, sent: Mapping[str, TensorSpec], scales: PolicyScales, version: int) -> None:
        check_scales(scales, version, self._arch.num_layers if self._fp8_cache else 0)
        if sent != self._specs:
            shares = self._find_shares(sent)
            self._places = [
                {name: [list(part) for part in parts if part is not None] for name, parts in share.items()}
                for share in shares
            ]
            self._in_parts = [cut is not None and not cut.is_gathered for _, cut in shares[0].values()]
            self._specs = dict(sent)
            self._rows = PolicyRows(self._specs)
        self._unwritten = {*sent}

    def write(self, shared: SharedWeights) -> None:
        if self._unwritten == self._specs.keys():
            self._complete = False
            if self._asleep:
                self._wake("weights")
            self.ask_policies("begin", self._places)
            self._places = None
        self.ask_policies("write", shared)
        self._unwritten.difference_update(shared["names"])

    def finish(self, scales: PolicyScales, version: int) -> SyncReport:
        assert not self._unwritten, f"{len(self._unwritten)} expected tensors are not written"
        self.ask_policies("end", version)
        if self._asleep:
            self._wake("kv_cache")
            self.ask_policies("clear_cache")
            self._asleep = False
        # Blocks of another policy, or of other scales, would be read as if they were this one's.
        if not self.drop_prefixes():
            raise EngineUpdateError(f"{self.product} kept its prefix cache: requests are still running")
        if self._fp8_cache:
            self.ask_policies("set_scales", [[layer.q, layer.k, layer.v] for layer in scales.layers])
        self._complete = True
        return self._read_back(scales)

    def generate(self, groups: Sequence[PromptGroup], sampling: Sampling) -> Iterator[list[Completion]]:
        yield from self.open_session(sampling).generate(groups)

    def open_session(self, sampling: Sampling) -> "ResidentSession":
        """Raises UserError: the engine cannot sample at this temperature."""
        assert self._complete, "update() comes before a generation, also after sleep()"
        assert self._routes or not sampling.report_experts, "an engine started without routes reports no experts"
        if 0 < sampling.temperature < self._lowest:
            raise UserError(
                f"rollout.temperature={sampling.temperature}: {self.product} samples at {self._lowest} or above"
            )
        if self._sleeps:
            # Release the shared policy, which torch caches: a long-lived allocation inside this block, like a workspace
            # of cuBLAS, would pin all of it.
            torch.cuda.empty_cache()
        self._begin(sampling.temperature or 1.0, sampling.truncation)
        return ResidentSession(self, sampling)

    def score(self, probes: Sequence[Probe], temperature: float) -> list[list[float]]:
        """With one sampled token a probe; one row."""
        assert self._complete, "update() comes before score(), also after sleep()"
        logprobs = [nan] * len(probes)
        waiting = {next(self._numbers): i for i in range(len(probes))}
        self._begin(temperature, None)
        try:
            requests = (Request(probe.context, temperature, target=probe.target) for probe in probes)
            self._submit(dict(zip(waiting, requests, strict=True)))
            while waiting:
                for number, output in self._outputs():
                    i = waiting.pop(number)
                    target = output.target
                    assert target is not None, "a target was asked for"
                    assert target[0] == probes[i].target, "the log-prob is not that of the target"
                    logprobs[i] = target[1]
        finally:
            self._end(list(waiting))
        return [logprobs]

    def fingerprint(self) -> str:
        assert self._complete, "update() comes before fingerprint(), also after sleep()"
        return self._digest(self.ask_policies("read_back"))

    def sleep(self) -> None:
        if self._sleeps and not self._asleep:
            self._fall_asleep()
            self._asleep = True
            self._complete = False

    def describe(self) -> dict[str, object]:
        description = self.ask_policy("describe")
        return {
            "kernels": kernels_by_type(description["linears"]),
            **self._description(description),
            "model": "aligned" if is_aligned(description) else "stock",
            "backend": description["attention"][0],
            "dtypes": {name: spec.dtype for name, spec in self._specs.items()},
            "scales": [dict(zip("qkv", layer, strict=True)) for layer in self.ask_policy("scales")],
        }

    def ask_policy(self, method: str, *arguments: Any) -> Any:
        return self.ask_policies(method, *arguments)[0]

    @abstractmethod
    def ask_policies(self, method: str, *arguments: Any) -> list[Any]:
        """A method of the `WorkerPolicy` in each process that shares the layers."""

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def drop_prefixes(self) -> bool:
        """Forget all cached prompts; false while requests are running."""

    def _read_parameters(self) -> None:
        parameters = self.ask_policy("parameters")
        self._parameters = {name: TensorSpec(dtype, tuple(shape)) for name, (dtype, shape) in parameters.items()}

    def _read_back(self, scales: PolicyScales) -> SyncReport:
        replies = self.ask_policies("read_back")
        version = self._common_value("versions", [each["version"] for each in replies])
        # Without an FP8 cache the engine has no use for scales, and none are written.
        held_scales = [written_scales(each["scales"]) if self._fp8_cache else scales.layers for each in replies]
        return SyncReport(
            version, self._digest(replies), PolicyScales(scales.version, self._common_value("scales", held_scales))
        )

    def _digest(self, replies: Sequence[Mapping[str, Any]]) -> str:
        held = np.stack([np.frombuffer(each["sums"], np.int64).reshape(-1, 2) for each in replies])
        # All workers hold the whole of what they put together.
        held[:, self._in_parts] = held[:, self._in_parts].sum(0)
        for number in np.flatnonzero((held != held[0]).any((0, 2))):
            self._common_value(f"bytes of {list(self._specs)[number]}", held[:, number].tolist())
        return self._rows.digest(hex_digits(held[0]))

    def _common_value(self, what: str, values: Sequence[_Value]) -> _Value:
        if any(each != values[0] for each in values):
            raise EngineUpdateError(f"{self.product}'s {len(values)} workers hold different {what}")
        return values[0]

    @abstractmethod
    def _description(self, description: Mapping[str, Any]) -> dict[str, object]: ...

    @abstractmethod
    def _find_shares(self, specs: Mapping[str, TensorSpec]) -> list[Share]:
        """Raises EngineUpdateError: it does not fit the parameters."""

    @abstractmethod
    def _wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """Take the memory of a part again; its contents are undefined."""

    @abstractmethod
    def _fall_asleep(self) -> None: ...

    @abstractmethod
    def _begin(self, temperature: float, truncation: Truncation | None) -> None: ...

    @abstractmethod
    def _submit(self, requests: Mapping[int, Request]) -> None: ...

    @abstractmethod
    def _outputs(self) -> list[tuple[int, Output]]:
        """Those that have ended, by their numbers."""

    @abstractmethod
    def _end(self, running: Sequence[int]) -> None:
        """Drop what still runs."""


class ResidentSession(Session):
    def __init__(self, engine: ResidentEngine, sampling: Sampling) -> None:
        self._engine = engine
        self._sampling = sampling
        self._open: dict[int, tuple[PromptGroup, int]] = {}

    @property
    def busy(self) -> bool:
        return bool(self._open)

    def add(self, groups: Sequence[PromptGroup]) -> None:
        new = {next(self._engine._numbers): (group, i) for group in groups for i in range(len(group.seeds))}
        self._open |= new
        self._engine._submit({number: self._request(*place) for number, place in new.items()})

    def step(self) -> list[Completion]:
        return [self._completion(output, *self._open.pop(number)) for number, output in self._engine._outputs()]

    def close(self) -> None:
        running = list(self._open)
        self._open = {}
        self._engine._end(running)

    def _request(self, group: PromptGroup, i: int) -> Request:
        sampling = self._sampling
        max_tokens = group.max_tokens_of(i, sampling.max_new_tokens)
        prefix_length = len(group.prefix_of(i))
        return Request(
            group.context(i),
            sampling.temperature,
            max_tokens,
            group.seeds[i],
            prefix_length,
            sampling.stop_ids,
            truncation=sampling.truncation,
        )

    def _completion(self, output: Output, group: PromptGroup, i: int) -> Completion:
        if output.reason == "abort":
            raise EngineLost(f"{self._engine.product} ends, as a signal asked it to")
        assert output.reason in ("stop", "length"), f"{self._engine.product} ended a request with {output.reason}"
        # The reason of a last token that is both, the last of all and a stop, may be the length.
        finish = finish_of(output.tokens, len(group.prefix_of(i)), self._sampling)
        experts = None
        if self._sampling.report_experts:
            positions = len(group.context(i)) + len(output.tokens) - 1
            experts = recorded_experts(output.experts, self._engine._arch.sparse_layers, positions)
        return Completion(group.group, group.samples[i], output.tokens, output.logprobs, finish, experts)


def kernels_by_type(linears: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Every kernel that occurs by type of linear (`qkv_proj`, ...)."""
    kernels: dict[str, dict[str, None]] = {}
    for name, linear in linears.items():
        kernels.setdefault(name.rpartition(".")[2], {})[linear["kernel"]] = None
    return {kind: "+".join(names) for kind, names in kernels.items()}


def executed_formats(
    description: Mapping[str, Any],
    contract: PrecisionContract,
    num_layers: int,
    kernels: Mapping[str, Collection[str] | None],
    backends: Collection[str],
) -> dict[str, object]:
    """The formats that run, in the words of the contract, from what a process reports of itself (`WorkerPolicy`).

    `kernels`: those that compute what the contract means, by type of the weights; None for any. `backends`: likewise of
    attention over an FP8 cache. A part that no contract means has its own name.
    """
    linears = {name: _linear_format(linear, kernels) for name, linear in description["linears"].items()}
    prefixes = [f"model.layers.{layer}." for layer in range(num_layers)]
    by_layer = [dict.fromkeys(linears[name] for name in linears if name.startswith(prefix)) for prefix in prefixes]
    layer_kinds = ["+".join(kinds) for kinds in by_layer]
    head = description["head"]
    activations = description["activations"]
    scales_agree = "fp8_block" not in layer_kinds or activations == contract.recipe.activations.rule
    return {
        "linear": layer_kinds,
        "attention": "+".join(dict.fromkeys(_attention_format(each, backends) for each in description["attention"])),
        "head": {"float32": "fp32", "bfloat16": "bf16"}.get(head, head),
        "scale_rule": contract.scale_rule if scales_agree else activations,
    }


def _linear_format(linear: Mapping[str, str], kernels: Mapping[str, Collection[str] | None]) -> str:
    dtype = linear["dtype"]
    kernel = linear["kernel"]
    names = kernels.get(dtype, ())
    if names is None or kernel in names:
        return {"bfloat16": "bf16", "float8_e4m3fn": "fp8_block"}[dtype]
    return f"{dtype} by {kernel}"


def _attention_format(layer: Mapping[str, Any], backends: Collection[str]) -> str:
    cache = layer["cache"]
    implementation = layer["implementation"]
    version = layer["version"]
    if cache in ("auto", "bfloat16"):
        return "bf16"
    if cache in ("fp8", "fp8_e4m3", "float8_e4m3fn") and implementation in backends and version == 3:
        return str(layer["products"])
    return f"{cache} by {implementation} {version}"


def recorded_experts(chosen: Any, sparse: Sequence[int], positions: int) -> Tensor:
    """`Completion.experts` from NumPy integers [positions, layers, k], with zeros in dense layers.

    Raises RuntimeError: positions are missing, or a token went to one expert twice, as where nothing was recorded.
    """
    if chosen is None or chosen.shape[0] != positions:
        count = "nothing" if chosen is None else f"{chosen.shape[0]}"
        raise RuntimeError(f"the engine recorded the experts of {count} of {positions} positions")
    # In one thread, whatever number torch has: a rollout has millions of these short rows.
    layer_experts = chosen[:, list(sparse)].astype(np.int16)
    layer_experts.sort(axis=-1)
    if (layer_experts[..., 1:] == layer_experts[..., :-1]).any():
        raise RuntimeError("the engine recorded one expert twice for a token")
    return torch.from_numpy(layer_experts)
