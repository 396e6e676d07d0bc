"""The rollout engine that runs the trainer's own decoder: exact on a CPU, no installation, no GPU."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fp8core.config.run import RunConfig
from fp8core.models.architecture import Architecture
from fp8core.models.decoder import TOP_K, Decoder
from fp8core.models.experts import RecordedRouting
from fp8core.models.weights import Formats, PolicyWeights, load_policy, rollout_formats
from fp8core.numerics.fingerprint import policy_digest
from fp8core.numerics.logprobs import greedy, log_softmax, sample, truncate, uniform
from fp8core.plan.memory import Device, EngineMemory, Need, engine_weights, shipped_bytes
from fp8core.rollout.engine import (
    Completion,
    Finish,
    PolicyScales,
    Probe,
    PromptGroup,
    Sampling,
    SyncReport,
    check_scales,
    finish_of,
)
from fp8core.rollout.kv_cache import KvCache, StoredRow
from fp8core.rollout.registry import EngineEntry
from fp8core.training.memory import EMULATED, emulated_bytes

_Key = tuple[int, tuple[int, ...]]
"""Seed of a completion, and all its tokens with those of its prompt."""


@dataclass
class _Sequence:
    """A completion in progress: `before` tokens were there, and with `last` it has all that it may have now.

    `begun` is its key when it began.
    """

    begun: _Key
    group: int
    sample: int
    before: int
    last: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    experts: list[Tensor] = field(default_factory=list)
    finish: Finish | None = None

    @classmethod
    def of(cls, group: PromptGroup, i: int, longest: int) -> "_Sequence":
        """Of a group's completion `i`, with at most `longest` tokens, those that were begun included."""
        before = len(group.begun_of(i))
        last = before + group.room_of(i, longest)
        return cls((group.seeds[i], group.context(i)), group.group, group.samples[i], before, last)

    @property
    def room(self) -> int:
        """Tokens that it may still write."""
        return self.last - self.before - len(self.tokens)

    @property
    def length(self) -> int:
        """Tokens of its prompt and of all that was written."""
        return len(self.begun[1]) + len(self.tokens)

    def note(self, token: int, logprob: float, sampling: Sampling) -> None:
        """Append a token, unless it is done."""
        if self.finish:
            return
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in sampling.stop_ids or self.before + len(self.tokens) == self.last:
            self.finish = finish_of(self.tokens, self.before, sampling)


class EmbeddedEngine:
    """Generates with `models.decoder` in the rollout formats of the contract."""

    def __init__(self, arch: Architecture, formats: Formats, max_batch: int, *, keeps_cache: bool = False) -> None:
        """`keeps_cache`: what older weights have written into the cache of an open completion stays at an update."""
        self._decoder = Decoder(arch, formats)
        self._max_batch, self._keeps_cache = max_batch, keeps_cache
        self._open: dict[_Key, StoredRow] = {}
        self._stored: dict[str, Tensor] = {}
        self._weights: PolicyWeights | None = None
        self._scales: PolicyScales | None = None

    def update(self, tensors: Mapping[str, Tensor], scales: PolicyScales, version: int) -> SyncReport:
        """Copy weights and scales in, then report what is held; `version` must be that of the scales."""
        fp8_cache = any(layer.attention.name == "fp8" for layer in self._decoder.formats.layers)
        check_scales(scales, version, self._decoder.arch.num_layers if fp8_cache else 0)
        self._open = self._rescaled(scales) if self._keeps_cache else {}
        stored = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        self._weights = load_policy(self._decoder.arch, stored)
        self._stored, self._scales = stored, scales
        return SyncReport(version=version, digest=self.fingerprint(), scales=self._scales)

    def _rescaled(self, scales: PolicyScales) -> dict[_Key, StoredRow]:
        """The caches that the policy before has gone on with, in the scales of a newer one."""
        held = self._scales
        found = {
            key: stored for key, stored in self._open.items() if held is not None and stored.version == held.version
        }
        if held is None or held.layers == scales.layers:
            return found
        for key, (version, keys, values) in found.items():
            forms = zip(self._decoder.formats.layers, held.layers, scales.layers, keys, values, strict=True)
            layers = [form.attention.store(k * old.k, v * old.v, new) for form, old, new, k, v in forms]
            found[key] = StoredRow(version, [k for k, _ in layers], [v for _, v in layers])
        return found

    def fingerprint(self) -> str:
        """Digest of the stored tensors, recomputed from their bytes."""
        return policy_digest(self._stored)

    def describe(self) -> dict[str, object]:
        """Formats by layer, dtype by parameter, and the scales in force."""
        return {
            "engine": "embedded",
            "accumulation": "exact",
            **self._decoder.formats.describe(),
            "dtypes": {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in self._stored.items()},
            "scales": [] if self._scales is None else [vars(layer) for layer in self._scales.layers],
            **({"kv_cache_after_update": "kept"} if self._keeps_cache else {}),
        }

    def sleep(self) -> None:
        """Keep everything: weights and caches lie in main memory."""

    def close(self) -> None:
        """Drop weights and scales."""
        self._stored, self._weights, self._scales, self._open = {}, None, None, {}

    @torch.no_grad()
    def generate(self, groups: Sequence[PromptGroup], sampling: Sampling) -> Iterator[list[Completion]]:
        """Generate wave by wave; each yield holds all completions of the groups that finished together."""
        assert self._decoder.arch.sparse_layers or not sampling.report_experts, "a dense model chooses no experts"
        held: dict[int, list[Completion]] = {}
        sizes = {group.group: len(group.seeds) for group in groups}
        going_on = [group for group in groups if group.begun and all(key in self._open for key in _keys(group))]
        others = [group for group in groups if group not in going_on]
        for wave in [*_waves(going_on, self._max_batch), *_waves(others, self._max_batch)]:
            for part in self._wave(wave, sampling):
                for completion in part:
                    held.setdefault(completion.group, []).append(completion)
                whole = [group for group, completions in held.items() if len(completions) == sizes[group]]
                if whole:
                    yield [completion for group in whole for completion in held.pop(group)]

    def open_session(self, sampling: Sampling) -> "EmbeddedSession":
        """Decode requests together that come at any time, each token as `generate` draws it."""
        assert self._weights is not None, "update() comes before open_session()"
        assert self._decoder.arch.sparse_layers or not sampling.report_experts, "a dense model chooses no experts"
        return EmbeddedSession(self, sampling, self._max_batch)

    @torch.no_grad()
    def score(self, probes: Sequence[Probe], temperature: float) -> list[list[float]]:
        """Log-prob of each target after its context, from one prefill; one row."""
        assert self._weights is not None, "update() comes before score()"
        hidden, _ = self._prefill([probe.context for probe in probes], 0, None)
        logprobs = log_softmax(self._decoder.formats.head.logits(hidden, self._weights.head), temperature)
        targets = torch.tensor([probe.target for probe in probes])
        return [logprobs.gather(-1, targets[:, None]).squeeze(-1).float().tolist()]

    def _wave(self, groups: Sequence[PromptGroup], sampling: Sampling) -> Iterator[list[Completion]]:
        """Decode together; yields groups, or parts of groups, as they finish."""
        batch = _Batch.of(groups, sampling.max_new_tokens)
        record = RecordedRouting() if sampling.report_experts else None
        contexts, owners = _contexts(groups)
        keys = [key for group in groups for key in _keys(group)]
        if all(key in self._open for key in keys):
            cache = KvCache.going_on([self._open.pop(key) for key in keys], sampling.max_new_tokens)
            cache.begin(1)
            last = torch.tensor([context[-1:] for _, context in keys])
            hidden = self._hidden(last, (batch.lengths - 1)[:, None], cache, record)
        else:
            hidden, cache = self._prefill(contexts, sampling.max_new_tokens, record)
            if record is not None:
                batch.note_experts(record.recorded(len(contexts))[owners])
            cache.select(owners)
            hidden = hidden[owners]
        assert self._scales is not None, "update() comes before generate()"
        version = self._scales.version
        for position in range(sampling.max_new_tokens):
            tokens = self._choose(batch, hidden, position, sampling)
            for i, key in batch.opened(position):
                self._open[key] = cache.stored(i, version)
            yield from batch.finished_groups()
            live = batch.live()
            if not live.numel():
                return
            # Dead rows cost as much as live ones; copying the cache costs about one decoding step.
            if live.numel() <= 0.75 * len(batch.rows):
                batch.select(live)
                cache.select(live)
                tokens = tokens[live]
            cache.begin(1)
            hidden = self._hidden(tokens[:, None], (batch.lengths + position)[:, None], cache, record)
            if record is not None:
                batch.note_experts(record.recorded(len(batch.rows)))

    def _prefill(
        self, contexts: Sequence[Sequence[int]], room: int, record: RecordedRouting | None
    ) -> tuple[Tensor, KvCache]:
        """Hidden state of each context's last token, [contexts, hidden], and their cache."""
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
        scales = self._scales.layers or None
        return self._decoder.hidden(self._weights, tokens, positions, cache, scales, routing=record or TOP_K)[:, -1]

    def _choose(self, batch: "_Batch", hidden: Tensor, position: int, sampling: Sampling) -> Tensor:
        """Pick the next token of every row and note it; int64 [B]."""
        tokens, chosen = self._draw(hidden, batch.seeds, batch.before + position, sampling)
        batch.note(tokens, chosen, sampling)
        return tokens

    def _draw(self, hidden: Tensor, seeds: Tensor, places: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
        """The next token of every row and its log-prob, int64 and FP32 [B].

        Args:
            hidden: [B, hidden] of the tokens before.
            seeds: int64 [B].
            places: int64 [B], how many tokens were drawn by the seed or said since the prompt.
            sampling: the rules.
        """
        assert self._weights is not None
        temperature = sampling.temperature or 1.0
        logits = self._decoder.formats.head.logits(hidden, self._weights.head)
        logprobs = log_softmax(truncate(logits, temperature, sampling.truncation), temperature)
        drawn = uniform(seeds, places)
        tokens = greedy(logprobs) if sampling.temperature == 0 else sample(logprobs, drawn)
        return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1).float()


_Part = tuple[list[_Sequence], Tensor, KvCache, list[int]]
"""Rows, the hidden state of each one's last token, their cache, and their places in it."""


class EmbeddedSession:
    """Requests that are decoded together, and enter between two tokens.

    A token depends on its row alone, so rows enter and leave at any time. When rows enter, the cache is copied. That
    costs about a decoding step, so they wait until they are a quarter of those in progress. Of a row that goes on from
    one that ended here, by its seed and tokens, only new tokens are computed.
    """

    def __init__(self, engine: EmbeddedEngine, sampling: Sampling, max_batch: int) -> None:
        self._engine, self._sampling, self._max_batch = engine, sampling, max_batch
        self._waiting: list[_Sequence] = []
        self._rows: list[_Sequence] = []
        self._cache: KvCache | None = None
        self._hidden = torch.empty(0)
        self._record = RecordedRouting() if sampling.report_experts else None
        # By seed: all tokens, and what the cache had of them when they were complete.
        self._kept: dict[int, tuple[tuple[int, ...], StoredRow]] = {}

    @property
    def busy(self) -> bool:
        """True while a request is in flight or waits."""
        return bool(self._rows or self._waiting)

    def add(self, groups: Sequence[PromptGroup]) -> None:
        """Further requests."""
        longest = self._sampling.max_new_tokens
        self._waiting += [_Sequence.of(group, i, longest) for group in groups for i in range(len(group.samples))]

    @torch.no_grad()
    def step(self) -> list[Completion]:
        """A token of every row: the completions that end with it."""
        live = sum(not row.finish for row in self._rows)
        if self._waiting and live < self._max_batch and 4 * len(self._waiting) >= live:
            self._admit(self._max_batch - live)
        rows, cache = self._rows, self._cache
        if not rows or cache is None:
            return []
        seeds = torch.tensor([row.begun[0] for row in rows], dtype=torch.int64)
        places = torch.tensor([row.before + len(row.tokens) for row in rows])
        tokens, logprobs = self._engine._draw(self._hidden, seeds, places, self._sampling)
        going = [i for i, row in enumerate(rows) if not row.finish]
        for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
            row.note(token, logprob, self._sampling)
        ended = [i for i in going if rows[i].finish]
        done = [_completion(rows[i]) for i in ended]
        self._keep(ended, cache)
        keep = [i for i, row in enumerate(rows) if not row.finish]
        if not keep:
            self._rows, self._cache = [], None
            return done
        # Dead rows cost as much as live ones; copying the cache costs about one decoding step.
        if len(keep) <= 0.75 * len(rows):
            cache.select(torch.tensor(keep))
            tokens, self._rows = tokens[keep], [rows[i] for i in keep]
        cache.begin(1)
        positions = torch.tensor([[row.length - 1] for row in self._rows])
        self._hidden = self._engine._hidden(tokens[:, None], positions, cache, self._record)
        if self._record is not None:
            self._note_experts(self._rows, self._record.recorded(len(self._rows)))
        return done

    def close(self) -> None:
        """Drop what is in flight."""
        self._waiting, self._rows, self._cache, self._kept = [], [], None, {}

    def _keep(self, ended: Sequence[int], cache: KvCache) -> None:
        """Keep the cache of rows that the next turn of their episodes goes on from; of no more than two batches."""
        if self._record is not None:
            return
        for i in ended:
            row = self._rows[i]
            if row.finish != "length":
                self._kept[row.begun[0]] = (*row.begun[1], *row.tokens), cache.stored(i, 0)
        while len(self._kept) > 2 * self._max_batch:
            del self._kept[next(iter(self._kept))]

    def _admit(self, most: int) -> None:
        """Let waiting rows in, beside those in progress."""
        entering, self._waiting = self._waiting[:most], self._waiting[most:]
        parts = [self._going_on([row for row in entering if self._is_kept(row)])]
        parts += [self._prefilled([row for row in entering if not self._is_kept(row)])]
        if self._cache is not None:
            live = [i for i, row in enumerate(self._rows) if not row.finish]
            parts.append(([self._rows[i] for i in live], self._hidden[live], self._cache, live))
        parts = [part for part in parts if part[0]]
        for row in entering:
            self._kept.pop(row.begun[0], None)
        (self._rows, self._hidden, self._cache, _), *others = parts
        if others:
            self._rows = [row for rows, _, _, _ in parts for row in rows]
            self._hidden = torch.cat([hidden for _, hidden, _, _ in parts])
            stored = [cache.stored(i, 0) for _, _, cache, places in parts for i in places]
            self._cache = KvCache.going_on(stored, max(row.room for row in self._rows))

    def _prefilled(self, rows: list[_Sequence]) -> _Part:
        """Rows whose contexts are computed, those of several rows once."""
        contexts: dict[tuple[int, ...], int] = {}
        owners = torch.tensor([contexts.setdefault(row.begun[1], len(contexts)) for row in rows], dtype=torch.int64)
        if not rows:
            return rows, owners, KvCache(torch.empty(0, 0), 0, 0), []
        hidden, cache = self._engine._prefill([*contexts], max(row.room for row in rows), self._record)
        if self._record is not None:
            self._note_experts(rows, self._record.recorded(len(contexts))[owners])
        cache.select(owners)
        return rows, hidden[owners], cache, [*range(len(rows))]

    def _is_kept(self, row: _Sequence) -> bool:
        """True if it goes on from a row that ended here."""
        kept = self._kept.get(row.begun[0])
        return kept is not None and row.begun[1][: len(kept[0])] == kept[0]

    def _going_on(self, rows: list[_Sequence]) -> _Part:
        """Rows whose contexts begin with what is kept: the rest is computed, padded on its left."""
        if not rows:
            return rows, torch.empty(0), KvCache(torch.empty(0, 0), 0, 0), []
        kept = [self._kept[row.begun[0]][1] for row in rows]
        rests = [row.begun[1][stored.keys[0].shape[1] :] for row, stored in zip(rows, kept, strict=True)]
        longest = max(map(len, rests))
        cache = KvCache.going_on(kept, longest + max(row.room for row in rows))
        tokens = torch.tensor([(0,) * (longest - len(rest)) + rest for rest in rests])
        columns = torch.arange(longest)
        lengths = torch.tensor([len(row.begun[1]) for row in rows])[:, None]
        cache.begin(longest, columns >= longest - torch.tensor([len(rest) for rest in rests])[:, None])
        positions = (lengths - longest + columns).clamp(min=0)
        return rows, self._engine._hidden(tokens, positions, cache, None), cache, [*range(len(rows))]

    @staticmethod
    def _note_experts(rows: Sequence[_Sequence], chosen: Tensor) -> None:
        """Append the experts of the newest positions, [B, T, sparse layers, k], which are padded on their left."""
        for row, positions in zip(rows, chosen.to(torch.int16), strict=True):
            if not row.finish:
                row.experts.append(positions[-row.length :])


class _Batch:
    """Rows that are decoded together, and which of them are done."""

    def __init__(self, rows: list[_Sequence], seeds: Tensor, lengths: Tensor) -> None:
        self.rows, self.seeds, self.lengths = rows, seeds, lengths
        self.before = torch.tensor([row.before for row in rows])
        self._open: dict[int, list[_Sequence]] = {}
        for row in rows:
            self._open.setdefault(row.group, []).append(row)

    @classmethod
    def of(cls, groups: Sequence[PromptGroup], longest: int) -> "_Batch":
        """Completions have at most `longest` tokens, those that were begun included."""
        rows = [_Sequence.of(group, i, longest) for group in groups for i in range(len(group.samples))]
        seeds = torch.tensor([seed for group in groups for seed in group.seeds], dtype=torch.int64)
        return cls(rows, seeds, torch.tensor([row.length for row in rows]))

    def note(self, tokens: Tensor, logprobs: Tensor, sampling: Sampling) -> None:
        """Append a token to every row that is not done."""
        for row, token, logprob in zip(self.rows, tokens.tolist(), logprobs.tolist(), strict=True):
            row.note(token, logprob, sampling)

    def note_experts(self, chosen: Tensor) -> None:
        """Append the experts of the newest positions, [B, T, sparse layers, k], to every row that is not done.

        A prompt's positions come at once, after padding on its left; those of the completion one by one.
        """
        for row, positions, length in zip(self.rows, chosen.to(torch.int16), self.lengths.tolist(), strict=True):
            if not row.finish:
                row.experts.append(positions[-length:])

    def opened(self, position: int) -> Iterator[tuple[int, _Key]]:
        """The rows whose room ended with the newest token, and what they are found by."""
        for i, row in enumerate(self.rows):
            if row.finish == "open" and len(row.tokens) == position + 1:
                seed, context = row.begun
                yield i, (seed, (*context, *row.tokens))

    def live(self) -> Tensor:
        """Indices of the rows that are not done."""
        return torch.tensor([i for i, row in enumerate(self.rows) if not row.finish], dtype=torch.int64)

    def select(self, rows: Tensor) -> None:
        """Keep these rows only."""
        self.rows = [self.rows[i] for i in rows.tolist()]
        self.seeds, self.lengths, self.before = self.seeds[rows], self.lengths[rows], self.before[rows]

    def finished_groups(self) -> Iterator[list[Completion]]:
        """The completions of newly finished groups, if any."""
        done = [group for group, rows in self._open.items() if all(row.finish for row in rows)]
        if done:
            yield [_completion(row) for group in done for row in self._open.pop(group)]


def _waves(groups: Sequence[PromptGroup], size: int) -> Iterator[list[PromptGroup]]:
    """Batches of at most `size` sequences, groups whole where they fit and in parts where they do not."""
    wave: list[PromptGroup] = []
    for part in (part for group in groups for part in _parts(group, size)):
        if wave and sum(len(other.seeds) for other in (*wave, part)) > size:
            yield wave
            wave = []
        wave.append(part)
    if wave:
        yield wave


def _parts(group: PromptGroup, size: int) -> Iterator[PromptGroup]:
    for start in range(0, len(group.seeds), size):
        rows = slice(start, start + size)
        yield replace(
            group, samples=group.samples[rows], seeds=group.seeds[rows], begun=group.begun[rows], room=group.room[rows]
        )


def _keys(group: PromptGroup) -> list[_Key]:
    """Of each completion, as it is before it goes on."""
    return [(seed, group.context(i)) for i, seed in enumerate(group.seeds)]


def _contexts(groups: Sequence[PromptGroup]) -> tuple[list[tuple[int, ...]], Tensor]:
    """The different contexts of completions, and which of them each has: int64 [completions]."""
    contexts, owners = list[tuple[int, ...]](), list[int]()
    for group in groups:
        if not group.begun:
            contexts.append(group.prompt)
        for i in range(len(group.seeds)):
            if group.begun:
                contexts.append((*group.prompt, *group.begun[i]))
            owners.append(len(contexts) - 1)
    return contexts, torch.tensor(owners)


def _completion(row: _Sequence) -> Completion:
    assert row.finish is not None, "a completion in progress"
    experts = torch.cat(row.experts) if row.experts else None
    return Completion(row.group, row.sample, row.tokens, row.logprobs, row.finish, experts)


def _memory(config: RunConfig, arch: Architecture, gpu: Device | None) -> EngineMemory:
    """Its weights as they are sent, and ready; its cache grows as it generates."""
    weights = engine_weights(shipped_bytes(arch, config.precision))
    formats = rollout_formats(config.precision, arch.num_layers)
    return EngineMemory((weights, Need("engine weights, ready", emulated_bytes(arch, formats), EMULATED)))


ENGINE = EngineEntry(
    name="embedded",
    build=lambda config, arch: EmbeddedEngine(
        arch,
        rollout_formats(config.precision, arch.num_layers),
        config.rollout.max_batch,
        keeps_cache=not config.pipeline.recompute_kv_cache_after_weight_update,
    ),
    requirements=lambda: "exact FP8 emulation on this CPU",
    memory=_memory,
    arithmetic=lambda config: "exact",
    continues=lambda config: "equal",
    keeps_cache=True,
)
