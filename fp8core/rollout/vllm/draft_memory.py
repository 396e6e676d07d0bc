"""Drafts for vLLM, found on the device: tokens that followed the last ones elsewhere in the texts of the same prompt.

vLLM schedules a step before the host has the tokens of the step before, so a draft of the host's would wait for each.
The memory is a ring of tokens, which has the texts of requests one after another, and a table. A context is the last 8,
4 or 2 tokens, with the prompt. The table has the place after each context, where it occurred last. Collisions and
places that are written over give other drafts, never other completions.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fp8core.numerics.packed import copy_to
from fp8core.rollout.drafts import ACCEPTED_TOKENS, DRAFT_TOKENS, GROUP, PROMPT, SAVED_FORWARDS, SOURCES

_NONE = len(SOURCES)
_CONTEXTS = (8, 4, 2)
_LONGEST = _CONTEXTS[0]
_PLACES = 1 << 22
# Of four bytes each; as many as two full batches of longest requests where that is more.
_TOKENS = 1 << 24
# The first 64 bits of the golden ratio's fraction, odd, as a signed integer.
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)


class Text(NamedTuple):
    """The first tokens of a request, of which `own` come after the prompt. `room`: tokens that it may write."""

    slot: int
    tokens: Sequence[int]
    own: int
    room: int


class DraftMemory:
    """Texts of requests, which a number of theirs (slot) identifies while they run."""

    def __init__(self, slots: int, longest: int, draft: int, device: torch.device) -> None:
        """`longest`: tokens of the longest request. `draft`: tokens of each draft."""
        self._draft = draft
        self._size = max(_TOKENS, 2 * slots * longest)
        # Places are counted without end, and the table has their doubles, plus 1 for a place in a prompt. The last
        # elements take what is not to be written.
        self._tokens = torch.zeros(self._size + 1, dtype=torch.int32, device=device)
        self._places = torch.zeros(_PLACES + 1, dtype=torch.int64, device=device)
        self._next = _LONGEST
        self._session = 0
        # int64 [slots, 2]: place of the first token, hash of the prompt.
        self._texts = torch.zeros(slots, 2, dtype=torch.int64, device=device)
        self._sources = torch.full((slots,), _NONE, device=device)
        self._counts = torch.zeros(_NONE + 1, 2, dtype=torch.int64, device=device)
        self._saved = torch.zeros((), dtype=torch.float64, device=device)
        self._back = torch.arange(1 - _LONGEST, 1, device=device)
        lengths = torch.tensor(_CONTEXTS, device=device)
        self._beyond = self._back <= -lengths[:, None]
        powers = torch.tensor([pow(_ODD, i + 1, 1 << 62) for i in range(_LONGEST)], device=device)
        self._factors = powers.masked_fill(self._beyond, 0)

    def begin_session(self) -> None:
        """Let the source of all that has been written be `earlier`."""
        self._session = self._next

    def begin(self, texts: Sequence[Text]) -> None:
        rows, tokens = list[tuple[int, ...]](), list[int]()
        for text in texts:
            length = len(text.tokens) - text.own
            rows.append((text.slot, self._next, hash(tuple(text.tokens[:length])), length, len(text.tokens)))
            tokens += text.tokens
            self._next += len(text.tokens) + text.room
        device = self._tokens.device
        slots, *about, prompt_lengths, lengths = copy_to(torch.tensor(rows), device).unbind(1)
        self._texts[slots] = torch.stack(about, 1)
        self._sources[slots] = _NONE
        owner = torch.arange(len(texts), device=device).repeat_interleave(lengths, output_size=len(tokens))
        offsets = torch.arange(len(tokens), device=device) - (lengths.cumsum(0) - lengths)[owner]
        starts, prompts = (each[owner] for each in about)
        self._tokens[(starts + offsets) % self._size] = copy_to(torch.tensor(tokens, dtype=torch.int32), device)
        self._remember(starts + offsets, prompts, offsets > 0, offsets < prompt_lengths[owner])

    def judged(self, slots: Tensor, drafted: Tensor, accepted: Tensor) -> None:
        """Count what became of the last drafts: tokens of each, int [n], of a forward."""
        self._counts.index_add_(0, self._sources[slots], torch.stack([drafted, accepted], 1).long())
        self._saved += accepted.double().mean()

    def extend(self, slots: Tensor, firsts: Tensor, tokens: Tensor, counts: Tensor) -> Tensor:
        """Add the first `counts` of `tokens` [n, width] to texts, as their tokens from number `firsts` on.

        Returns int64 [n, draft]: the next draft of each text."""
        starts, prompts = self._texts[slots].unbind(1)
        begins = starts + firsts
        offsets = torch.arange(tokens.shape[1], device=tokens.device)
        places = begins[:, None] + offsets
        is_new = offsets < counts[:, None]
        self._tokens[torch.where(is_new, places % self._size, self._size)] = tokens.int()
        every = prompts.repeat_interleave(len(offsets))
        self._remember(places.flatten(), every, is_new.flatten(), torch.zeros_like(every))
        contexts = self._context(begins + counts)
        found = self._places[self._keys(contexts, prompts)]
        is_equal = ((self._context(found >> 1) == contexts[:, None]) | self._beyond).all(-1)
        best = is_equal.int().argmax(1, keepdim=True)
        found = found.gather(1, best)
        place = found >> 1
        source = torch.where((found & 1).bool(), PROMPT, GROUP + (place < self._session).long())
        self._sources[slots] = torch.where(is_equal.gather(1, best), source, _NONE)[:, 0]
        return self._tokens[(place + torch.arange(self._draft, device=place.device)) % self._size].long()

    def counts(self) -> Counter[str]:
        """By the names of `rollout.drafts`; a forward is saved where all of its requests write one token more."""
        counts = Counter({SAVED_FORWARDS: round(self._saved.item())})
        for source, tokens in zip(SOURCES, self._counts.tolist(), strict=False):
            counts += Counter(
                {name + source: n for name, n in zip((DRAFT_TOKENS, ACCEPTED_TOKENS), tokens, strict=True)}
            )
        return counts

    def _context(self, places: Tensor) -> Tensor:
        """int32 [..., 8]: the tokens before each place."""
        return self._tokens[(places[..., None] - 1 + self._back) % self._size]

    def _keys(self, contexts: Tensor, prompts: Tensor) -> Tensor:
        """int64 [n, 3]: the place in the table of each context."""
        # Token 0 counts, so that contexts of two lengths differ.
        mixed = ((1 + contexts[:, None].long()) * self._factors).sum(-1) + prompts[:, None]
        return (mixed * _ODD >> 40) & (_PLACES - 1)

    def _remember(self, places: Tensor, prompts: Tensor, is_new: Tensor, in_prompt: Tensor) -> None:
        keys = self._keys(self._context(places), prompts)
        values = (2 * places + in_prompt)[:, None].expand_as(keys)
        self._places[torch.where(is_new[:, None], keys, _PLACES)] = values
