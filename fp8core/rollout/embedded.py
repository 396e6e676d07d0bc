"""The rollout engine that runs the trainer's own decoder: exact, on a CPU."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from fp8core.rewards.scorer import Key
from fp8core.rollout.drafts import FORWARDS, SAVED_FORWARDS, Drafts
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

_FORWARD_ROWS = 32
"""Rows that cost as much as a forward without any: of `tiny` about 40, of larger models fewer."""


class KvCache:
    """K and V of sequences that are decoded together: a row for each, whose columns are positions.

    A call extends each by tokens of its own number, from any position: what it writes again is replaced
    (`models.decoder.Context`). `mask`: bool [B, 1, Tq, columns so far], for the call in progress.
    """

    def __init__(self, rows: int, capacity: int, num_layers: int) -> None:
        self._shape = rows, capacity
        self._keys: list[Tensor | None] = [None] * num_layers
        self._values: list[Tensor | None] = [None] * num_layers
        self._rows = self._places = self._columns = self.mask = torch.empty(0)

    def begin(self, starts: Tensor, counts: Tensor) -> Tensor:
        """Begin a call with so many tokens of each row from a position on, int64 [B] each; positions, [1, tokens]."""
        self._rows = torch.arange(len(counts)).repeat_interleave(counts)
        self._places = torch.arange(len(self._rows)) - (counts.cumsum(0) - counts)[self._rows]
        self._columns = starts[self._rows] + self._places
        queries = starts[:, None] + torch.arange(int(counts.max()))
        self.mask = (torch.arange(int(self._columns.max()) + 1) <= queries[..., None])[:, None]
        return self._columns[None]

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys = self._keys[layer]
        values = self._values[layer]
        if keys is None or values is None:
            (rows, capacity), (_, heads, _, dim) = self._shape, k.shape
            # A product with a weight of zero must be zero.
            keys, values = (x.new_zeros(rows, heads, capacity, dim) for x in (k, v))
            self._keys[layer], self._values[layer] = keys, values
        keys[self._rows, :, self._columns] = k[0].transpose(0, 1)
        values[self._rows, :, self._columns] = v[0].transpose(0, 1)
        columns = self.mask.shape[-1]
        return keys[:, :, :columns], values[:, :, :columns]

    def by_sequence(self, q: Tensor) -> Tensor:
        by_row = q.new_zeros(len(self.mask), q.shape[1], self.mask.shape[2], q.shape[3])
        by_row[self._rows, :, self._places] = q[0].transpose(0, 1)
        return by_row

    def by_token(self, out: Tensor) -> Tensor:
        return out[self._rows, :, self._places].transpose(0, 1)[None]

    def select(self, rows: Tensor) -> None:
        """Keep (or repeat) these rows: int64 [B']."""
        self._shape = len(rows), self._shape[1]
        self._keys = [None if keys is None else keys[rows] for keys in self._keys]
        self._values = [None if values is None else values[rows] for values in self._values]


@dataclass
class _Sequence:
    """A completion in progress: `before` of the tokens of its context are its own, `last` is its longest length.

    `draft`: tokens that the forward in progress takes for those that follow.
    """

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
    draft: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, group: PromptGroup, i: int, longest: int) -> "_Sequence":
        before = len(group.prefix_of(i))
        last = before + group.max_tokens_of(i, longest)
        return cls(group.group, group.samples[i], group.seeds[i], group.context(i), before, last)

    @property
    def key(self) -> Key:
        return self.group, self.sample

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

    def write(self, tokens: Sequence[int], logprobs: Sequence[float], sampling: Sampling) -> list[int]:
        """The tokens that it takes, of those drawn after its last token and after each of its draft.

        A token behind another one than the draft's was drawn from something else.
        """
        for count, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True), start=1):
            self.tokens.append(token)
            self.logprobs.append(logprob)
            if token in sampling.stop_ids or not self.room:
                self.finish = finish_of(self.tokens, self.before, sampling)
            if self.finish or [token] != self.draft[count - 1 : count]:
                break
        self.draft = []
        return self.tokens[-count:]


class EmbeddedEngine:
    def __init__(self, arch: Architecture, formats: Formats, max_batch: int, drafts: Drafts | None = None) -> None:
        self._decoder = Decoder(arch, formats)
        self._drafts = drafts
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
        return EmbeddedSession(self, sampling, self._max_batch, self._drafts)

    def draft_counts(self) -> Counter[str]:
        return Counter() if self._drafts is None else self._drafts.counts.copy()

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
        lengths = torch.tensor([len(context) for context in contexts])
        cache = KvCache(len(contexts), int(lengths.max()) + room, self._decoder.arch.num_layers)
        positions = cache.begin(torch.zeros_like(lengths), lengths)
        tokens = [token for context in contexts for token in context]
        return self._hidden(tokens, positions, cache, record)[lengths.cumsum(0) - 1], cache

    def _hidden(
        self, tokens: Sequence[int], positions: Tensor, cache: KvCache, record: RecordedRouting | None
    ) -> Tensor:
        """[tokens, hidden]."""
        assert self._weights is not None, "update() comes before generate()"
        assert self._scales is not None, "update() comes before generate()"
        row = torch.tensor([tokens])
        scales = self._scales.layers
        return self._decoder.hidden(self._weights, row, positions, cache, scales, routing=record or TOP_K)[0]

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

    def __init__(self, engine: EmbeddedEngine, sampling: Sampling, max_batch: int, drafts: Drafts | None) -> None:
        self._engine = engine
        self._sampling = sampling
        self._max_batch = max_batch
        self._drafts = drafts
        self._waiting: list[_Sequence] = []
        # Of these, finished ones have no tokens in a forward any more.
        self._rows: list[_Sequence] = []
        self._cache: KvCache | None = None
        # Of the tokens of the last forward, those of a row beside one another.
        self._hidden = torch.empty(0)
        self._chosen = torch.empty(0)
        # Since rows were admitted: forwards, and tokens of the longest row, for each of which there would be one.
        self._forwards = self._longest = 0
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
        completions = [row.completion() for row in self._write() if row.finish]
        keep = [i for i, row in enumerate(rows) if not row.finish]
        if not keep:
            self._count_forwards()
            self._rows = []
            self._cache = None
            return completions
        # Dead rows cost attention; copying the cache costs about one decoding step.
        if len(keep) <= 0.75 * len(rows):
            cache.select(torch.tensor(keep))
            self._rows = [rows[i] for i in keep]
        self._forward(cache)
        return completions

    def close(self) -> None:
        self._end_drafts(row for row in self._rows if not row.finish)
        self._waiting = []
        self._rows = []
        self._cache = None

    def _admit(self) -> None:
        self._rows = self._waiting[: self._max_batch]
        self._waiting = self._waiting[self._max_batch :]
        self._forwards = self._longest = 0
        contexts: dict[tuple[int, ...], int] = {}
        owners = torch.tensor([contexts.setdefault(row.context, len(contexts)) for row in self._rows])
        hidden, self._cache = self._engine._prefill([*contexts], max(row.room for row in self._rows), self._record)
        if self._record is not None:
            by_context = self._chosen_experts(self._record).split([len(context) for context in contexts])
            for row, owner in zip(self._rows, owners.tolist(), strict=True):
                row.experts.append(by_context[owner][:-1])
            self._chosen = torch.stack([experts[-1] for experts in by_context])[owners]
        self._cache.select(owners)
        self._hidden = hidden[owners]
        if self._drafts is not None:
            for row in self._rows:
                split = len(row.context) - row.before
                self._drafts.begin(row.key, row.context[:split], row.context[split:])

    def _write(self) -> list[_Sequence]:
        """Draw a token after each one of the last forward, and let the rows in it write; returns these rows."""
        live_rows = [row for row in self._rows if not row.finish]
        counts = [1 + len(row.draft) for row in live_rows]
        seeds = torch.tensor([row.seed for row in live_rows]).repeat_interleave(torch.tensor(counts))
        places = [row.before + len(row.tokens) + i for row in live_rows for i in range(1 + len(row.draft))]
        drawn, logprobs = self._engine._draw(self._hidden, seeds, torch.tensor(places), self._sampling)
        parts = zip(drawn.split(counts), logprobs.split(counts), strict=True)
        first = 0
        for row, count, (row_tokens, row_logprobs) in zip(live_rows, counts, parts, strict=True):
            tokens = row.write(row_tokens.tolist(), row_logprobs.tolist(), self._sampling)
            if self._record is not None:
                row.experts.append(self._chosen[first : first + len(tokens)])
            first += count
            self._longest = max(self._longest, len(row.tokens))
            if self._drafts is not None:
                self._drafts.observe(row.key, tokens)
        self._end_drafts(row for row in live_rows if row.finish)
        return live_rows

    def _forward(self, cache: KvCache) -> None:
        live_rows = [row for row in self._rows if not row.finish]
        if self._drafts is not None:
            drafts = self._drafts.propose({row.key: row.room for row in live_rows})
            for row in live_rows:
                row.draft = drafts.get(row.key, [])
        # The last token of a row is in no cache yet.
        tokens = [token for row in live_rows for token in (row.tokens[-1], *row.draft)]
        starts = torch.tensor([row.length - 1 for row in self._rows])
        counts = torch.tensor([0 if row.finish else 1 + len(row.draft) for row in self._rows])
        self._hidden = self._engine._hidden(tokens, cache.begin(starts, counts), cache, self._record)
        self._forwards += 1
        if self._record is not None:
            self._chosen = self._chosen_experts(self._record)

    def _count_forwards(self) -> None:
        if self._drafts is not None:
            self._drafts.counts[FORWARDS] += self._forwards
            # The first token follows from the prompt's own forward.
            self._drafts.counts[SAVED_FORWARDS] += self._longest - 1 - self._forwards

    def _end_drafts(self, rows: Iterable[_Sequence]) -> None:
        if self._drafts is not None:
            for row in rows:
                self._drafts.end(row.key)

    @staticmethod
    def _chosen_experts(record: RecordedRouting) -> Tensor:
        """Of the tokens of the last forward, int16 [tokens, sparse layers, k]."""
        return record.recorded(1)[0].to(torch.int16)


def _drafts(config: RunConfig) -> Drafts | None:
    longest = config.rollout.speculation.draft_tokens
    return Drafts(longest, _FORWARD_ROWS) if longest else None


def _memory(config: RunConfig, arch: Architecture, gpu: Device | None) -> EngineMemory:
    weights = engine_weights(config, arch)
    return EngineMemory((weights, Need("engine weights, ready", emulated_bytes(arch), EMULATED)))


ENGINE = EngineEntry(
    name="embedded",
    build=lambda config, arch: EmbeddedEngine(
        arch, rollout_formats(config.precision, arch.num_layers), config.rollout.max_batch, _drafts(config)
    ),
    requirements=lambda: "exact FP8 emulation on this CPU",
    memory=_memory,
    arithmetic=lambda config: "exact",
    continues=lambda config: "equal",
    truncates=True,
    speculates=True,
)
