"""Completions early and late in a run, with the mismatch and the reward of each.

Texts of training prompts come from the tokens, through the tokenizer of the newest checkpoint. Without one a completion
is a single piece of text. Functions that take `missing` append a line to it for each file that cannot be read and that
gc did not remove.
"""

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from typing import Any, Generic, TypeVar

from fp8core.errors import UserError
from fp8core.models.tokenizer import Tokenizer
from fp8core.report.chart import counted
from fp8core.report.tokens import unread, was_removed
from fp8core.rewards.scorer import Key
from fp8core.store.artifacts import ArtifactError, ArtifactStore, Ref
from fp8core.store.layout import POLICY
from fp8core.store.ledger import START, CheckpointEntry
from fp8core.store.run_view import Commit, RunView
from fp8core.store.tables import COMPLETION_KEY, HeldoutSample, key_of, keys_of

PROMPTS, SAMPLES, HELDOUT_PROMPTS = 3, 2, 4
MOST_TOKENS = 160
_SEARCHED, _MOST_CHARACTERS, _MOST_PROMPT_CHARACTERS = 5, 800, 3200
_THRESHOLDS = (1e-3, 1e-2, 1e-1)
LEGEND = ("below 0.001", "0.001 to 0.01", "0.01 to 0.1", "0.1 and more")
_COLUMNS = (*COMPLETION_KEY, "prompt_id", "prompt_tokens", "tokens", "logprobs", "written", "text")
_JUDGED = {"reward": "rewards", "outcome": "rewards", "detail": "rewards", "advantage": "advantages"}
"""What is shown of a completion -> the kind of the table that has it; of several tables of a step the last."""

Decode = Callable[[Sequence[int]], str]
Row = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Piece:
    """Text of one token or several; level 0: equal bit for bit, 1 to 4: as in `LEGEND`, None: not compared."""

    text: str
    level: int | None


@dataclass(frozen=True)
class ShownTurn:
    """A part of an episode, with who speaks and numbers as its heading; all of a completion without an environment."""

    heading: str
    pieces: Sequence[Piece]


@dataclass(frozen=True)
class ShownCompletion:
    """A text of the policy; `left_out` tokens are not shown, `unverified`: its log-probs were not computed again."""

    reward: float | None
    turns: Sequence[ShownTurn]
    left_out: int = 0
    unverified: bool = False
    advantage: float | None = None


@dataclass(frozen=True)
class PromptExamples:
    step: int
    prompt: str
    completions: Sequence[ShownCompletion]


@dataclass(frozen=True)
class EarlyAndLate(Generic[T]):
    """Prompts early and late; `same` where those are the same ones."""

    early: Sequence[T]
    late: Sequence[T]
    same: bool

    def in_order(self) -> list[T]:
        return [one for pair in zip_longest(self.early, self.late) for one in pair if one is not None]


class Examples(EarlyAndLate[PromptExamples]):
    @property
    def differing(self) -> bool:
        return any(self._levels())

    @property
    def compared(self) -> bool:
        return any(level is not None for level in self._levels())

    @property
    def unverified(self) -> bool:
        return all(completion.unverified for one in self.in_order() for completion in one.completions)

    def _levels(self) -> Iterator[int | None]:
        for one in self.in_order():
            for completion in one.completions:
                yield from (piece.level for turn in completion.turns for piece in turn.pieces)


def pick_completions(view: RunView, names: tuple[str, str], missing: list[str]) -> EarlyAndLate[list[Row]] | None:
    """By prompt the rows of its completions, with the log-probs of both policies and the reward; None without any.

    `names` are of the artifacts with rollouts and with log-probs. The prompts are the same ones early and late where
    the searched steps have one in common.
    """
    commits = sorted(view.commits, key=lambda commit: commit.step)
    whole = [commit for commit in commits if commit.step > START and _is_there(view, commit, names)]
    half = (len(whole) + 1) // 2
    early, late = whole[: min(half, _SEARCHED)], whole[max(half, len(whole) - _SEARCHED) :][::-1]
    first, last = dict[str, list[Row]](), dict[str, list[Row]]()
    for by_prompt, searched in ((first, early), (last, late)):
        for commit in searched:
            for name, rows in _read(view, commit, names, missing).items():
                by_prompt.setdefault(name, rows)
    if not first and not last:
        return None

    def uncompared(name: str) -> int:
        return sum(row["trained"] is None for by_prompt in (first, last) for row in by_prompt.get(name, ()))

    # A run that generates ahead compares a share of its completions.
    shared = sorted((name for name in first if name in last), key=uncompared)[:PROMPTS]
    earliest = sorted(first, key=lambda name: (first[name][0]["step"], uncompared(name)))
    latest = sorted(last, key=lambda name: (-last[name][0]["step"], uncompared(name)))
    return EarlyAndLate(
        [first[name] for name in shared or earliest[:PROMPTS]],
        [last[name] for name in shared or latest[:PROMPTS]],
        bool(shared),
    )


def read_examples(view: RunView, names: tuple[str, str], missing: list[str]) -> Examples | None:
    """The completions that a report shows (arguments: `pick_completions`); None where no step has any."""
    picked = pick_completions(view, names, missing)
    if picked is None:
        return None
    decode = _decoder(view, missing)
    early, late = ([_shown(rows, decode) for rows in some] for some in (picked.early, picked.late))
    return Examples(early, late, picked.same)


@dataclass(frozen=True)
class HeldoutPair:
    """A held-out prompt at the first and at the last evaluation, and the steps of these."""

    steps: tuple[int, int]
    first: HeldoutSample
    last: HeldoutSample


def heldout_pairs(view: RunView, missing: list[str]) -> list[HeldoutPair]:
    """The texts that evaluations keep of held-out prompts; none before there are two evaluations with texts."""
    commits = sorted(view.commits, key=lambda commit: commit.step)
    first, last = (_first_evaluation(view, order, missing) for order in (commits, commits[::-1]))
    if first is None or last is None or first[0] == last[0]:
        return []
    (start, before), (end, after) = first, last
    return [HeldoutPair((start, end), before[name], after[name]) for name in before if name in after]


def heldout_examples(pairs: Sequence[HeldoutPair]) -> Examples | None:
    def shown(step: int, sample: HeldoutSample) -> PromptExamples:
        whole = ShownTurn("", [Piece(sample.text, None)])
        return PromptExamples(step, sample.prompt, [ShownCompletion(sample.score, [whole])])

    some = pairs[:HELDOUT_PROMPTS]
    early = [shown(pair.steps[0], pair.first) for pair in some]
    return Examples(early, [shown(pair.steps[1], pair.last) for pair in some], True) if some else None


def _first_evaluation(
    view: RunView, commits: Sequence[Commit], missing: list[str]
) -> tuple[int, dict[str, HeldoutSample]] | None:
    """Step and samples, by prompt_id, of the first of these commits that evaluated, if it kept any."""
    store = ArtifactStore(view.folder)
    for commit in commits:
        for ref in commit.artifacts.values():
            if ref.kind != "evaluation" or was_removed(view, ref):
                continue
            try:
                content = store.get_json(ref)
            except ArtifactError as error:
                missing.append(unread("held-out completions", commit.step, error, view.folder))
                continue
            if content:  # Steps between evaluations have an empty one.
                samples = [HeldoutSample.model_validate(sample) for sample in content.get("samples") or ()]
                return commit.step, {sample.prompt_id: sample for sample in samples}
    return None


def largest_difference(row: Row) -> float | None:
    """The largest |log p - log g| of a token that the policy wrote; None where none was compared."""
    if row["trained"] is None:
        return None
    pairs = zip(row["trained"], row["logprobs"], row["written"], strict=True)
    return max((abs(p - g) for p, g, written in pairs if written), default=None)


def _is_there(view: RunView, commit: Commit, names: tuple[str, str]) -> bool:
    refs = [commit.artifacts.get(name) for name in names]
    return all(ref is not None and not was_removed(view, ref) for ref in refs)


def _read(view: RunView, commit: Commit, names: tuple[str, str], missing: list[str]) -> dict[str, list[Row]]:
    """By prompt a row for each completion of a step: log-probs under both policies, reward, outcome and advantage.

    `trained` is None where they were not compared.
    """
    store = ArtifactStore(view.folder)
    rollouts, scored = (commit.artifacts[name] for name in names)
    judged: dict[Key, Row] = defaultdict(lambda: dict.fromkeys(_JUDGED))
    try:
        rows = store.get_table(rollouts, _COLUMNS).to_pylist()
        table = store.get_table(scored, [*COMPLETION_KEY, "logprobs"])
        turns = _played_turns(store, commit, rollouts)
        for ref in commit.artifacts.values():
            if (columns := [name for name, kind in _JUDGED.items() if kind == ref.kind]) and not was_removed(view, ref):
                for row in store.get_table(ref, [*COMPLETION_KEY, *columns]).to_pylist():
                    judged[key_of(row)] |= row
    except ArtifactError as error:
        missing.append(unread("completions", commit.step, error, view.folder))
        return {}
    trained = dict(zip(keys_of(table), table["logprobs"].to_pylist(), strict=True))
    by_prompt: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        key = key_of(row)
        more = {"step": commit.step, "trained": trained.get(key), "turns": turns.get(key, [])}
        by_prompt[row["prompt_id"]].append({**row, **judged[key], **more})
    return by_prompt


def _played_turns(store: ArtifactStore, commit: Commit, rollouts: Ref) -> dict[Key, list[Row]]:
    """The turns of each episode of a step; none without an environment, or where gc was."""
    turns: dict[Key, list[Row]] = defaultdict(list)
    for task in commit.tasks.values():
        refs = [ref for ref in task.outputs.values() if ref.kind == "turns" and rollouts in task.outputs.values()]
        for ref in refs:
            if store.path(ref).exists():
                for row in store.get_table(ref).to_pylist():
                    turns[key_of(row)].append(row)
    return turns


def _shown(rows: Sequence[Row], decode: Decode | None) -> PromptExamples:
    first = rows[0]
    prompt = first["prompt_id"] if decode is None else decode(first["prompt_tokens"])
    if len(prompt) > _MOST_PROMPT_CHARACTERS:
        prompt = f"\u2026{prompt[-_MOST_PROMPT_CHARACTERS:]}"
    # A run that generates ahead compares few: those come first.
    shown = sorted(rows, key=lambda row: row["trained"] is None)[:SAMPLES]
    return PromptExamples(first["step"], prompt, [_completion(row, decode) for row in shown])


def _completion(row: Row, decode: Decode | None) -> ShownCompletion:
    unverified = row["trained"] is None
    if decode is None:
        # The tokens of a part of the text are not known.
        whole = ShownTurn("", [Piece(row["text"][:_MOST_CHARACTERS], None)])
        return ShownCompletion(row["reward"], [whole], 0, unverified, row["advantage"])
    shown = row["tokens"][:MOST_TOKENS]
    trained = row["trained"] or [None] * len(shown)
    pieces = [
        Piece(text, level_of(p - g) if written and p is not None else None)
        for text, p, g, written in zip(_texts(shown, decode), trained, row["logprobs"], row["written"], strict=False)
    ]
    turns = list(_turns_of_tokens(row, pieces)) or [ShownTurn("", list(_joined(pieces)))]
    return ShownCompletion(row["reward"], turns, len(row["tokens"]) - len(shown), unverified, row["advantage"])


def level_of(difference: float) -> int:
    return 0 if difference == 0 else 1 + bisect_right(_THRESHOLDS, abs(difference))


def _turns_of_tokens(row: Row, pieces: Sequence[Piece]) -> Iterator[ShownTurn]:
    """Policy and environment in turn, as far as there are pieces, one for each token."""
    for turn in row["turns"]:
        begin, end, after = turn["begin"], turn["end"], turn["observation_end"]
        if turn["turn"] and begin < len(pieces):
            yield ShownTurn(_heading(row, turn), list(_joined(pieces[begin:end])))
        if end < min(after, len(pieces)):
            yield ShownTurn("environment", list(_joined(pieces[end:after])))


def turn_mismatch(row: Row, turn: Row) -> tuple[float, int] | None:
    """The largest |log p - log g| of a turn's tokens, and how many differ; None where they were not compared."""
    if row["trained"] is None:
        return None
    tokens = slice(turn["begin"], turn["end"])
    apart = [abs(p - g) for p, g in zip(row["trained"][tokens], row["logprobs"][tokens], strict=True)]
    return max(apart, default=0.0), sum(value != 0 for value in apart)


def _heading(row: Row, turn: Row) -> str:
    mismatch = turn_mismatch(row, turn)
    calls = len(json.loads(turn["calls"] or "[]"))
    words = [
        counted(calls, "call") + (f", {turn['failed']} failed" if turn["failed"] else ""),
        "not compared" if mismatch is None else f"largest difference {mismatch[0]:.3g}, {mismatch[1]} tokens differ",
        *([f"reward {turn['reward']:g}"] if turn["reward"] else []),
        *([f"malformed: {turn['malformed']}"] if turn["malformed"] else []),
        *([f"{turn['outcome']}: {turn['detail']}".rstrip(": ")] if turn["outcome"] else []),
    ]
    return f"policy, turn {turn['turn']} ({'; '.join(words)})"


def _texts(tokens: Sequence[int], decode: Decode) -> Iterator[str]:
    """The text that each token adds; a character of several tokens comes with the last of them."""
    before = ""
    for end in range(1, len(tokens) + 1):
        text = decode(tokens[:end])
        if text.endswith("\ufffd") and end < len(tokens):
            yield ""
            continue
        yield text[len(before) :]
        before = text


def _joined(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """Pieces of which neighbours without a colour are one; each coloured one stays alone."""
    for (level, _), some in groupby(enumerate(pieces), lambda one: (one[1].level, one[1].level and one[0])):
        yield Piece("".join(piece.text for _, piece in some), level)


def _decoder(view: RunView, missing: list[str]) -> Decode | None:
    """The tokenizer of the newest checkpoint that is in the run's folder; None without one that can be read."""
    entries = [entry for _, entry in view.entries if isinstance(entry, CheckpointEntry)]
    folders = [view.folder / entry.uri / POLICY for entry in reversed(entries)]
    folder = next((folder for folder in folders if folder.is_dir()), None)
    if folder is None:
        return None
    try:
        return Tokenizer.load(folder).decode
    except UserError as error:
        missing.append(str(error).removeprefix(f"{view.folder}/"))
        return None
