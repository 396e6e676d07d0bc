"""The rollout engine that runs the trainer's own decoder: exact, on a CPU."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fp8core.config.run import RunConfig
from fp8core.models.architecture import Architecture
from fp8core.models.decoder import TOP_K, Decoder
from fp8core.models.experts import RecordedRouting
from fp8core.models.weights import Formats, PolicyWeights, PreparedWeights, load_policy, rollout_formats
from fp8core.numerics.attention import FP8_CACHE_FORMS
from fp8core.numerics.fingerprint import policy_digest
from fp8core.numerics.logprobs import greedy, log_softmax, sample, uniform
from fp8core.numerics.support import truncated
from fp8core.resources.memory import EMULATED, Device, EngineMemory, Need, emulated_bytes, engine_weights
from fp8core.rollout.engine import (
    Completion,
    Finish,
    PolicyScales,
    Probe,
    PromptGroup,
    Sampling,
    Session,
    SyncReport,
    check_scales,
    finish_of,
)
from fp8core.rollout.registry import EngineEntry


class KvCache:
    """K and V of a batch that is decoded together: left-padded prompts, one column a token (`models.decoder.Context`).

    `mask`: bool [B, 1, Tq, columns so far], for the call in progress.
    """

    def __init__(self, valid: Tensor, capacity: int, num_layers: int) -> None:
        """From the prompts' validity, bool [B, T], and room for `capacity` columns."""
        batch, length = valid.shape
        self._valid = torch.zeros(batch, capacity, dtype=torch.bool)
        self._valid[:, :length] = valid
        self._columns = 0
        self._keys: list[Tensor | None] = [None] * num_layers
        self._values: list[Tensor | None] = [None] * num_layers
        self.mask = torch.empty(0)

    def begin(self, length: int) -> None:
        """Open `length` further columns, and set the mask of their queries."""
        start = self._columns
        self._columns = self._columns + length
        if start:
            self._valid[:, start : self._columns] = True
        columns = torch.arange(self._columns)
        queries = columns[start:, None]
        visible = (columns <= queries) & self._valid[:, None, : self._columns]
        self.mask = (visible | (columns == queries))[:, None]

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys = self._keys[layer]
        values = self._values[layer]
        if keys is None or values is None:
            shape = (k.shape[0], k.shape[1], self._valid.shape[1], k.shape[3])
            keys = k.new_empty(shape)
            values = v.new_empty(shape)
            self._keys[layer], self._values[layer] = keys, values
        start = self._columns - k.shape[2]
        keys[:, :, start : self._columns] = k
        values[:, :, start : self._columns] = v
        return keys[:, :, : self._columns], values[:, :, : self._columns]

    def select(self, rows: Tensor) -> None:
        """Keep (or repeat) these rows of the batch: int64 [B']."""
        self._valid = self._valid[rows]
        self._keys = [None if keys is None else keys[rows] for keys in self._keys]
        self._values = [None if values is None else values[rows] for values in self._values]


@dataclass
class _Sequence:
    """A completion in progress: `before` of the tokens of its context are its own, `last` is its longest length."""

    group: int
    sample: int
    seed: int
    context: tuple[int, ...]
    before: int
    last: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    experts: list[Tensor] = field(default_factory=list)
    finish: Finish | None = None

    @classmethod
    def of(cls, group: PromptGroup, i: int, longest: int) -> "_Sequence":
        before = len(group.prefix_of(i))
        last = before + group.max_tokens_of(i, longest)
        return cls(group.group, group.samples[i], group.seeds[i], group.context(i), before, last)

    @property
    def room(self) -> int:
        return self.last - self.before - len(self.tokens)

    @property
    def length(self) -> int:
        return len(self.context) + len(self.tokens)

    def completion(self) -> Completion:
        assert self.finish is not None, "a completion in progress"
        experts = torch.cat(self.experts) if self.experts else None
        return Completion(self.group, self.sample, self.tokens, self.logprobs, self.finish, experts)

    def note(self, token: int, logprob: float, sampling: Sampling) -> None:
        if self.finish:
            return
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in sampling.stop_ids or not self.room:
            self.finish = finish_of(self.tokens, self.before, sampling)


class EmbeddedEngine:
    def __init__(self, arch: Architecture, formats: Formats, max_batch: int) -> None:
        self._decoder = Decoder(arch, formats)
        self._max_batch = max_batch
        self._weights_in_use: dict[str, Tensor] = {}
        self._weights: PolicyWeights | None = None
        self._scales: PolicyScales | None = None

    def update(self, tensors: Mapping[str, Tensor], scales: PolicyScales, version: int) -> SyncReport:
        fp8_cache = self._decoder.formats.attention.name in FP8_CACHE_FORMS
        check_scales(scales, version, self._decoder.arch.num_layers if fp8_cache else 0)
        copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        self._weights = load_policy(self._decoder.arch, PreparedWeights(copies, self._decoder.formats.recipe.weights))
        self._weights_in_use = copies
        self._scales = scales
        return SyncReport(version=version, digest=self.fingerprint(), scales=self._scales)

    def fingerprint(self) -> str:
        return policy_digest(self._weights_in_use)

    def describe(self) -> dict[str, object]:
        return {
            "engine": "embedded",
            "accumulation": "exact",
            **self._decoder.formats.describe(),
            "dtypes": {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in self._weights_in_use.items()},
            "scales": [] if self._scales is None else [vars(layer) for layer in self._scales.layers],
        }

    def sleep(self) -> None:
        """Weights and caches lie in main memory."""

    def close(self) -> None:
        self._weights_in_use = {}
        self._weights = None
        self._scales = None

    def generate(self, groups: Sequence[PromptGroup], sampling: Sampling) -> Iterator[list[Completion]]:
        yield from self.open_session(sampling).generate(groups)

    def open_session(self, sampling: Sampling) -> "EmbeddedSession":
        assert self._weights is not None, "update() comes before open_session()"
        assert self._decoder.arch.sparse_layers or not sampling.report_experts, "a dense model chooses no experts"
        return EmbeddedSession(self, sampling, self._max_batch)

    @torch.no_grad()
    def score(self, probes: Sequence[Probe], temperature: float) -> list[list[float]]:
        assert self._weights is not None, "update() comes before score()"
        hidden, _ = self._prefill([probe.context for probe in probes], 0, None)
        logprobs = log_softmax(self._decoder.formats.head.logits(hidden, self._weights.head), temperature)
        targets = torch.tensor([probe.target for probe in probes])
        return [logprobs.gather(-1, targets[:, None]).squeeze(-1).float().tolist()]

    def _prefill(
        self, contexts: Sequence[Sequence[int]], room: int, record: RecordedRouting | None
    ) -> tuple[Tensor, KvCache]:
        """Hidden state of each context's last token, [contexts, hidden]."""
        longest = max(map(len, contexts))
        tokens = torch.zeros(len(contexts), longest, dtype=torch.int64)
        valid = torch.zeros(len(contexts), longest, dtype=torch.bool)
        for i, context in enumerate(contexts):
            tokens[i, longest - len(context) :] = torch.tensor(context)
            valid[i, longest - len(context) :] = True
        cache = KvCache(valid, longest + room, self._decoder.arch.num_layers)
        cache.begin(longest)
        return self._hidden(tokens, (valid.cumsum(-1) - 1).clamp(min=0), cache, record), cache

    def _hidden(self, tokens: Tensor, positions: Tensor, cache: KvCache, record: RecordedRouting | None) -> Tensor:
        assert self._weights is not None, "update() comes before generate()"
        assert self._scales is not None, "update() comes before generate()"
        scales = self._scales.layers
        return self._decoder.hidden(self._weights, tokens, positions, cache, scales, routing=record or TOP_K)[:, -1]

    def _draw(self, hidden: Tensor, seeds: Tensor, places: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
        """int64 and FP32 [B], from [B, hidden]."""
        assert self._weights is not None
        temperature = sampling.temperature or 1.0
        logits = self._decoder.formats.head.logits(hidden, self._weights.head)
        logprobs = log_softmax(truncated(logits, temperature, sampling.truncation), temperature)
        numbers = uniform(seeds, places)
        tokens = greedy(logprobs) if sampling.temperature == 0 else sample(logprobs, numbers)
        return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1).float()


class EmbeddedSession(Session):
    """Requests that are decoded together; those that come meanwhile wait. A token depends on its row alone."""

    def __init__(self, engine: EmbeddedEngine, sampling: Sampling, max_batch: int) -> None:
        self._engine = engine
        self._sampling = sampling
        self._max_batch = max_batch
        self._waiting: list[_Sequence] = []
        self._rows: list[_Sequence] = []
        self._cache: KvCache | None = None
        self._hidden = torch.empty(0)
        self._record = RecordedRouting() if sampling.report_experts else None

    @property
    def busy(self) -> bool:
        return bool(self._rows or self._waiting)

    def add(self, groups: Sequence[PromptGroup]) -> None:
        longest = self._sampling.max_new_tokens
        self._waiting += [_Sequence.of(group, i, longest) for group in groups for i in range(len(group.samples))]

    @torch.no_grad()
    def step(self) -> list[Completion]:
        if self._waiting and not self._rows:
            self._admit()
        rows = self._rows
        cache = self._cache
        if not rows or cache is None:
            return []
        seeds = torch.tensor([row.seed for row in rows], dtype=torch.int64)
        places = torch.tensor([row.before + len(row.tokens) for row in rows])
        tokens, logprobs = self._engine._draw(self._hidden, seeds, places, self._sampling)
        live_rows = [row for row in rows if not row.finish]
        for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
            row.note(token, logprob, self._sampling)
        completions = [row.completion() for row in live_rows if row.finish]
        keep = [i for i, row in enumerate(rows) if not row.finish]
        if not keep:
            self._rows = []
            self._cache = None
            return completions
        # Dead rows cost as much as live ones; copying the cache costs about one decoding step.
        if len(keep) <= 0.75 * len(rows):
            cache.select(torch.tensor(keep))
            tokens = tokens[keep]
            self._rows = [rows[i] for i in keep]
        cache.begin(1)
        positions = torch.tensor([[row.length - 1] for row in self._rows])
        self._hidden = self._engine._hidden(tokens[:, None], positions, cache, self._record)
        if self._record is not None:
            self._note_experts(self._rows, self._record.recorded(len(self._rows)))
        return completions

    def close(self) -> None:
        self._waiting = []
        self._rows = []
        self._cache = None

    def _admit(self) -> None:
        self._rows = self._waiting[: self._max_batch]
        self._waiting = self._waiting[self._max_batch :]
        contexts: dict[tuple[int, ...], int] = {}
        owners = torch.tensor([contexts.setdefault(row.context, len(contexts)) for row in self._rows])
        hidden, self._cache = self._engine._prefill([*contexts], max(row.room for row in self._rows), self._record)
        if self._record is not None:
            self._note_experts(self._rows, self._record.recorded(len(contexts))[owners])
        self._cache.select(owners)
        self._hidden = hidden[owners]

    @staticmethod
    def _note_experts(rows: Sequence[_Sequence], chosen: Tensor) -> None:
        """[B, T, sparse layers, k], which are padded on their left."""
        for row, positions in zip(rows, chosen.to(torch.int16), strict=True):
            if not row.finish:
                row.experts.append(positions[-row.length :])


def _memory(config: RunConfig, arch: Architecture, gpu: Device | None) -> EngineMemory:
    weights = engine_weights(config, arch)
    return EngineMemory((weights, Need("engine weights, ready", emulated_bytes(arch), EMULATED)))


ENGINE = EngineEntry(
    name="embedded",
    build=lambda config, arch: EmbeddedEngine(
        arch, rollout_formats(config.precision, arch.num_layers), config.rollout.max_batch
    ),
    requirements=lambda: "exact FP8 emulation on this CPU",
    memory=_memory,
    arithmetic=lambda config: "exact",
    continues=lambda config: "equal",
    truncates=True,
)
