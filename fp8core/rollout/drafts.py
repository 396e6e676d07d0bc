"""Drafts: tokens that a policy will probably write, from what was written for the same prompt before.

An engine draws a token at every position of a draft in one forward, and takes those that equal the draft's. So a draft
changes how long a rollout takes, and no token of it. Nothing here is stored: after a kill the memory starts empty.

A context is the last 16, 8, 4, 2 or 1 tokens. Of each context that has occurred a vote (Boyer and Moore, "MJRTY", 1981)
has the token that mostly followed, and of a tie the newest. A draft continues with the vote of the longest context.
The contexts of a prompt are of three sources: the prompt, the completions of its group, and earlier completions.

The price of a draft is its rows in the forward. A forward costs as much as `forward_rows` rows, and each row one more.
Tokens are added, the most probable first, while they raise the expected tokens over the cost. Their probability is the
share of like votes that came true. With many sequences in a forward that share must be near 1, with few a low one pays.
"""

from array import array
from collections import Counter, deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

SOURCES = ("prompt", "group", "earlier")
PROMPT, GROUP, EARLIER = range(len(SOURCES))
CONTEXTS = (16, 8, 4, 2, 1)
DRAFT_TOKENS = "draft_tokens_"
"""With a source, the count of drafted tokens."""
ACCEPTED_TOKENS = "accepted_tokens_"
FORWARDS, SAVED_FORWARDS = "forwards", "saved_forwards"
"""Counts of an engine: forwards of decoding, and those that a rollout without drafts would have had beside them."""

MEMORY_TOKENS = 1 << 22
"""Earlier tokens in memory, four bytes each: prompts of long ago make way."""
PROMPT_TOKENS = 1 << 15
"""Those of one prompt: the newest."""
VOTES = 1 << 20
"""Contexts of all prompts in flight, about a hundred bytes each: a prompt beyond them has no drafts."""

_MOST_VOTES = 63
# Votes that one estimate is for: 1, 2 to 3, and more.
_LEVELS = (1, 3, _MOST_VOTES)
# The newest outcomes weigh most in an estimate.
_OUTCOMES = 512


class Guess(NamedTuple):
    """A probable token; guesses of one `kind` have one estimate."""

    token: int
    kind: int

    @property
    def source(self) -> str:
        return SOURCES[self.kind % len(SOURCES)]


class Votes:
    """Of each context the token that mostly followed."""

    def __init__(self) -> None:
        # Hash of a context -> token, source and votes in one integer.
        self._votes: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._votes)

    def add(self, tokens: Sequence[int], begin: int, source: int) -> None:
        """Let the tokens from `begin` on vote, each for the contexts before it."""
        votes = self._votes
        for place in range(max(1, begin), len(tokens)):
            token = tokens[place]
            for context in CONTEXTS:
                if context > place:
                    continue
                key = hash(tuple(tokens[place - context : place]))
                entry = votes.get(key, 0)
                count = entry & _MOST_VOTES
                if count and entry >> 8 == token:
                    votes[key] = token << 8 | source << 6 | min(count + 1, _MOST_VOTES)
                elif count > 1:
                    votes[key] = entry - 1
                else:
                    votes[key] = token << 8 | source << 6 | 1

    def guess(self, tokens: Sequence[int]) -> Guess | None:
        """The token after these, of which the last 16 count."""
        for number, context in enumerate(CONTEXTS):
            if context <= len(tokens) and (entry := self._votes.get(hash(tuple(tokens[-context:])))):
                level = next(i for i, most in enumerate(_LEVELS) if entry & _MOST_VOTES <= most)
                return Guess(entry >> 8, (number * len(_LEVELS) + level) * len(SOURCES) + (entry >> 6 & 3))
        return None


class Acceptance:
    """The share of guesses that came true, by kind; three of four where nothing is known, so that they are tried."""

    def __init__(self) -> None:
        kinds = len(CONTEXTS) * len(_LEVELS) * len(SOURCES)
        self._outcomes = [0] * kinds
        self._hits = [0] * kinds
        self.shares = [0.75] * kinds

    def note(self, kind: int, is_hit: bool) -> None:
        self._outcomes[kind] += 1
        self._hits[kind] += is_hit
        if self._outcomes[kind] > _OUTCOMES:
            self._outcomes[kind] //= 2
            self._hits[kind] //= 2
        self.shares[kind] = (self._hits[kind] + 3) / (self._outcomes[kind] + 4)


@dataclass
class _Sequence:
    """A sequence in flight.

    `first`: where the tokens begin that are written now. `voted`: tokens that have voted. `guesses`: of the tokens that
    follow; a draft has the first `draft_length`.
    """

    prompt: "_Prompt"
    tokens: list[int]
    first: int
    voted: int
    guesses: list[Guess] = field(default_factory=list)
    draft_length: int = 0


@dataclass
class _Prompt:
    """A prompt and what was written for it.

    `visit`: how often it came into flight; `votes`: None until they are needed.
    """

    tokens: tuple[int, ...]
    visit: int = 0
    live: dict[Hashable, _Sequence] = field(default_factory=dict)
    # Written tokens behind a context of theirs, the length of that context, and the visit.
    pieces: "deque[tuple[array[int], int, int]]" = field(default_factory=deque)
    size: int = 0
    votes: Votes | None = None

    def build_votes(self) -> Votes:
        votes = Votes()
        votes.add(self.tokens, 0, PROMPT)
        for tokens, first, visit in self.pieces:
            votes.add(tokens, first, GROUP if visit == self.visit else EARLIER)
        return votes

    def count_live(self, votes: Votes) -> None:
        for sequence in self.live.values():
            if sequence.voted < len(sequence.tokens):
                # No context is longer: the cost of a token is the same in a long sequence.
                start = max(0, sequence.voted - CONTEXTS[0])
                votes.add(sequence.tokens[start:], sequence.voted - start, GROUP)
                sequence.voted = len(sequence.tokens)

    def remember(self, sequence: _Sequence) -> int:
        """Keep what a sequence wrote; returns by how many tokens the memory has grown."""
        if sequence.first == len(sequence.tokens):
            return 0
        start = max(0, sequence.first - CONTEXTS[0])
        self.pieces.append((array("i", sequence.tokens[start:]), sequence.first - start, self.visit))
        before = self.size
        self.size += len(self.pieces[-1][0])
        while self.size > PROMPT_TOKENS:
            self.size -= len(self.pieces.popleft()[0])
        return self.size - before


class Drafts:
    """Drafts for the sequences of one engine, which a number or a name of the engine's identifies.

    `counts`: of the engine's life, by the names above.
    """

    def __init__(self, max_tokens: int, forward_rows: int) -> None:
        self._max_tokens = max_tokens
        self._forward_rows = forward_rows
        self._acceptance = Acceptance()
        self._live: dict[Hashable, _Sequence] = {}
        # By hash, the ones of long ago first.
        self._prompts: dict[int, _Prompt] = {}
        self._size = 0
        self.counts = Counter[str]()

    def begin(self, key: Hashable, prompt: Sequence[int], prefix: Sequence[int]) -> None:
        """A sequence comes into flight: `prefix` has its tokens after the prompt."""
        number = hash(tuple(prompt))
        known = self._prompts.pop(number, None) or _Prompt(tuple(prompt))
        self._prompts[number] = known
        if not known.live:
            known.visit += 1
        tokens = [*prompt, *prefix]
        # The tokens of a prefix have voted with the call that wrote them.
        self._live[key] = known.live[key] = _Sequence(known, tokens, len(tokens), len(tokens))

    def propose(self, rooms: Mapping[Hashable, int]) -> dict[Hashable, list[int]]:
        """Drafts for the next forward. `rooms`: the sequences in it, and how many tokens each may still write."""
        tokens = float(len(rooms))
        cost = float(self._forward_rows + len(rooms))
        drafts = dict[Hashable, list[int]]()
        # Nothing is looked up, and nothing votes, where no guess can pay.
        if max(self._acceptance.shares) * cost <= tokens:
            return drafts
        candidates = [
            (chance, key)
            for key, room in rooms.items()
            for chance in self._guess(key, min(self._max_tokens, room - 1), tokens / cost)
        ]
        lengths = Counter[Hashable]()
        for chance, key in sorted(candidates, key=lambda candidate: -candidate[0]):
            if chance * cost <= tokens:
                break
            tokens += chance
            cost += 1
            lengths[key] += 1
        for key, length in lengths.items():
            sequence = self._live[key]
            sequence.draft_length = length
            drafts[key] = [guess.token for guess in sequence.guesses[:length]]
            self.counts.update(DRAFT_TOKENS + guess.source for guess in sequence.guesses[:length])
        return drafts

    def observe(self, key: Hashable, tokens: Sequence[int]) -> None:
        """A sequence has written tokens: those of its draft that came true, and one more."""
        sequence = self._live[key]
        # The token behind a draft judges a guess that was in none.
        for place, (guess, token) in enumerate(zip(sequence.guesses, tokens, strict=False)):
            self._acceptance.note(guess.kind, guess.token == token)
            if guess.token != token:
                break
            if place < sequence.draft_length:
                self.counts[ACCEPTED_TOKENS + guess.source] += 1
        sequence.guesses = []
        sequence.draft_length = 0
        sequence.tokens += tokens

    def end(self, key: Hashable) -> None:
        sequence = self._live.pop(key)
        prompt = sequence.prompt
        if prompt.votes is not None:
            prompt.count_live(prompt.votes)
        del prompt.live[key]
        self._size += prompt.remember(sequence)
        if not prompt.live:
            prompt.votes = None
        while self._size > MEMORY_TOKENS:
            oldest = next((number for number, each in self._prompts.items() if not each.live), None)
            if oldest is None:
                break
            self._size -= self._prompts.pop(oldest).size

    def _guess(self, key: Hashable, most: int, least: float) -> Iterator[float]:
        """Guess the next tokens of a sequence: the chance of each with all before it, while above `least`."""
        sequence = self._live[key]
        sequence.guesses = []
        votes = self._votes(sequence.prompt) if most > 0 else None
        tail = sequence.tokens[-CONTEXTS[0] :]
        chance = 1.0
        while votes is not None and len(sequence.guesses) < most and (guess := votes.guess(tail)) is not None:
            sequence.guesses.append(guess)
            chance *= self._acceptance.shares[guess.kind]
            if chance <= least:
                return
            tail.append(guess.token)
            yield chance

    def _votes(self, prompt: _Prompt) -> Votes | None:
        if prompt.votes is None:
            indexes = {id(each.prompt): each.prompt.votes for each in self._live.values()}
            if sum(len(votes) for votes in indexes.values() if votes is not None) > VOTES:
                return None
            prompt.votes = prompt.build_votes()
        prompt.count_live(prompt.votes)
        return prompt.votes
