"""Completions early and late in a run, with the mismatch and the reward of each: what the policy writes.

Held-out prompts are the same ones at every evaluation, which keeps a few texts. Of training prompts the same ones are
shown where the searched steps have a prompt in common. Texts of these come from the tokens, through the
tokenizer of the newest checkpoint. Without one a completion is a single piece of text.
"""

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, repeat, zip_longest
from typing import Any

from fp8core.durable import refuse_link
from fp8core.errors import UserError
from fp8core.models.tokenizer import Tokenizer
from fp8core.report.chart import counted
from fp8core.report.tokens import Unread, was_removed
from fp8core.rewards.scorer import Key
from fp8core.store.artifacts import ArtifactError, ArtifactStore, Ref
from fp8core.store.layout import POLICY
from fp8core.store.ledger import START, CheckpointEntry
from fp8core.store.run_view import Commit, RunView
from fp8core.store.schemas import HeldoutSample
from fp8core.store.tables import COMPLETION_KEY, key_of, keys_of

PROMPTS, SAMPLES, SEARCHED, HELDOUT_PROMPTS = 3, 2, 5, 4
MOST_TOKENS, MOST_CHARACTERS = 160, 800
MOST_PROMPT_TOKENS, MOST_PROMPT_CHARACTERS = 800, 3200
THRESHOLDS = (1e-3, 1e-2, 1e-1)
"""Where a token's |log p - log g| gets the next colour; exactly 0 has none."""
LEGEND = ("below 0.001", "0.001 to 0.01", "0.01 to 0.1", "0.1 and more")
_COLUMNS = (*COMPLETION_KEY, "prompt_id", "prompt_tokens", "tokens", "logprobs", "written", "text")
_JUDGED = {"reward": "rewards", "outcome": "rewards", "detail": "rewards", "advantage": "advantages"}
"""What is shown of a completion -> the kind of the table that has it; of several tables of a step the last."""

Decode = Callable[[Sequence[int]], str]
Row = dict[str, Any]


@dataclass(frozen=True)
class Piece:
    """Text of one token or several: 0 equal bit for bit, 1 to 4 by `THRESHOLDS`; None: not compared."""

    text: str
    level: int | None


@dataclass(frozen=True)
class ShownTurn:
    """A part of an episode: who speaks, numbers in words, and the text."""

    speaker: str
    note: str
    pieces: Sequence[Piece]


@dataclass(frozen=True)
class ShownCompletion:
    """A text of the policy with its reward; `left_out` tokens are not shown. An episode is shown by its `turns`.

    `unverified`: it is none of the share whose log-probs were computed again. `advantage`: of the update.
    """

    reward: float | None
    pieces: Sequence[Piece]
    left_out: int
    turns: Sequence[ShownTurn] = ()
    unverified: bool = False
    advantage: float | None = None


@dataclass(frozen=True)
class Asked:
    step: int
    prompt: str
    completions: Sequence[ShownCompletion]


@dataclass(frozen=True)
class Examples:
    """Prompts early and late; `same` where those are the same ones."""

    early: Sequence[Asked]
    late: Sequence[Asked]
    same: bool

    @property
    def differing(self) -> bool:
        return any(piece.level for piece in self._pieces())

    @property
    def compared(self) -> bool:
        return any(piece.level is not None for piece in self._pieces())

    @property
    def unverified(self) -> bool:
        """True if the log-probs of no completion that is shown were computed again."""
        return all(completion.unverified for completion in self._completions())

    def in_order(self) -> list[Asked]:
        return [asked for pair in zip_longest(self.early, self.late) for asked in pair if asked is not None]

    def _completions(self) -> Iterator[ShownCompletion]:
        return (completion for one in (*self.early, *self.late) for completion in one.completions)

    def _pieces(self) -> Iterator[Piece]:
        return (piece for completion in self._completions() for piece in completion.pieces)


def level_of(difference: float) -> int:
    """The colour of a token: 0, none, where its log-probs are equal bit for bit."""
    return 0 if difference == 0 else 1 + bisect_right(THRESHOLDS, abs(difference))


@dataclass(frozen=True)
class Picked:
    """All completions of a few prompts early and late, a list for each prompt; `same` where those are the same ones."""

    early: Sequence[Sequence[Row]]
    late: Sequence[Sequence[Row]]
    same: bool

    def in_order(self) -> list[Sequence[Row]]:
        return [rows for pair in zip_longest(self.early, self.late) for rows in pair if rows is not None]


def pick_completions(view: RunView, names: tuple[str, str], missing: list[str]) -> Picked | None:
    """Rows of the completions of a few prompts, with the log-probs of both policies and the reward; None without any.

    `names` are of the artifacts with rollouts and with log-probs; `missing` takes a line for what cannot be read and
    was not removed by gc.
    """
    commits = sorted(view.commits, key=lambda commit: commit.step)
    whole = [commit for commit in commits if commit.step > START and _kept(view, commit, names)]
    half = (len(whole) + 1) // 2
    unread = Unread("completions")
    first, last = dict[str, list[Row]](), dict[str, list[Row]]()
    for some, found in (
        (whole[: min(half, SEARCHED)], first),
        (whole[: max(half, len(whole) - SEARCHED) - 1 : -1], last),
    ):
        for commit in some:
            for name, rows in _read(view, commit, names, unread).items():
                found.setdefault(name, rows)
    missing += unread.lines()
    if not first and not last:
        return None

    def uncompared(name: str) -> int:
        return sum(row["trained"] is None for found in (first, last) for row in found.get(name, ()))

    # A run that generates ahead compares a share of its completions.
    shared = sorted((name for name in first if name in last), key=uncompared)[:PROMPTS]
    earliest = sorted(first, key=lambda name: (first[name][0]["step"], uncompared(name)))
    latest = sorted(last, key=lambda name: (-last[name][0]["step"], uncompared(name)))
    return Picked(
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
    early, late = ([_asked(rows, decode) for rows in some] for some in (picked.early, picked.late))
    return Examples(early, late, picked.same)


@dataclass(frozen=True)
class HeldoutPair:
    """A held-out prompt at the first and at the last evaluation, and the steps of these."""

    steps: tuple[int, int]
    first: HeldoutSample
    last: HeldoutSample


def heldout_pairs(view: RunView, missing: list[str]) -> list[HeldoutPair]:
    """The texts that evaluations keep of held-out prompts; none before there are two evaluations with texts.

    `missing` takes a line for what cannot be read and was not removed by gc.
    """
    commits = sorted(view.commits, key=lambda commit: commit.step)
    unread = Unread("held-out completions")
    first, last = (_first_evaluation(view, order, unread) for order in (commits, commits[::-1]))
    missing += unread.lines()
    if first is None or last is None or first[0] == last[0]:
        return []
    (start, before), (end, after) = first, last
    return [HeldoutPair((start, end), before[name], after[name]) for name in before if name in after]


def heldout_examples(pairs: Sequence[HeldoutPair]) -> Examples | None:
    if not pairs:
        return None
    early, late = (
        [
            Asked(pair.steps[end], sample.prompt, [ShownCompletion(sample.score, [Piece(sample.text, None)], 0)])
            for pair in pairs[:HELDOUT_PROMPTS]
            for sample in [(pair.first, pair.last)[end]]
        ]
        for end in (0, 1)
    )
    return Examples(early, late, True)


def _first_evaluation(
    view: RunView, commits: Sequence[Commit], unread: Unread
) -> tuple[int, dict[str, HeldoutSample]] | None:
    """Step and samples, by prompt_id, of the first of these commits that evaluated, if it kept any."""
    store, known_empty = ArtifactStore(view.folder), set[str]()
    for commit in commits:
        for ref in commit.artifacts.values():
            if ref.kind != "evaluation" or ref.digest in known_empty or was_removed(view, ref):
                continue
            try:
                content = store.get_json(ref)
            except ArtifactError as error:
                unread.add(commit.step, error, view.folder)
                continue
            if content:
                found = [HeldoutSample.model_validate(sample) for sample in content.get("samples") or ()]
                return commit.step, {sample.prompt_id: sample for sample in found}
            known_empty.add(ref.digest)
    return None


def largest_difference(row: Row) -> float | None:
    """The largest |log p - log g| of a token that the policy wrote; None where none was compared."""
    if row["trained"] is None:
        return None
    pairs = zip(row["trained"], row["logprobs"], row["written"], strict=True)
    return max((abs(p - g) for p, g, written in pairs if written), default=None)


def _kept(view: RunView, commit: Commit, names: tuple[str, str]) -> bool:
    refs = [commit.artifacts.get(name) for name in names]
    return all(ref is not None and not was_removed(view, ref) for ref in refs)


def _read(view: RunView, commit: Commit, names: tuple[str, str], unread: Unread) -> dict[str, list[Row]]:
    """By prompt a row for each completion of a step: log-probs under both policies, reward, outcome and advantage.

    `trained` is None where they were not compared, `advantage` in steps of earlier versions.
    """
    store = ArtifactStore(view.folder)
    rollouts, scored = (commit.artifacts[name] for name in names)
    try:
        rows = store.get_table(rollouts, _COLUMNS).to_pylist()
        table = store.get_table(scored, [*COMPLETION_KEY, "logprobs"])
        turns = played_turns(store, commit, rollouts)
        judged: dict[Key, Row] = defaultdict(lambda: dict.fromkeys(_JUDGED))
        for ref in commit.artifacts.values():
            if (columns := [name for name, kind in _JUDGED.items() if kind == ref.kind]) and not was_removed(view, ref):
                for row in store.get_table(ref, [*COMPLETION_KEY, *columns]).to_pylist():
                    judged[key_of(row)] |= row
        trained: list[Sequence[float] | None] = table["logprobs"].to_pylist()
        if scored.kind == "behaviour":
            by_key = dict(zip(keys_of(table), trained, strict=True))
            trained = [by_key.get(key_of(row)) for row in rows]
        lengths = [None if values is None else len(values) for values in trained]
        if len(lengths) != len(rows) or any(
            length not in (None, len(row["logprobs"])) for row, length in zip(rows, lengths, strict=True)
        ):
            raise ArtifactError(f"{store.path(scored)}: logprobs: not as many items in every row as the rollouts have")
    except ArtifactError as error:
        unread.add(commit.step, error, view.folder)
        return {}
    found: dict[str, list[Row]] = defaultdict(list)
    for row, values in zip(rows, trained, strict=True):
        key = key_of(row)
        more = {"step": commit.step, "trained": values, "turns": turns.get(key, [])}
        found[row["prompt_id"]].append({**row, **judged[key], **more})
    return found


def played_turns(store: ArtifactStore, commit: Commit, rollouts: Ref) -> dict[Key, list[Row]]:
    """The turns of each episode of a step; none without an environment, or where gc was.

    Raises ArtifactError: they cannot be read.
    """
    found: dict[Key, list[Row]] = defaultdict(list)
    for task in commit.tasks.values():
        refs = [ref for ref in task.outputs.values() if ref.kind == "turns" and rollouts in task.outputs.values()]
        for ref in refs:
            if store.path(ref).exists():
                for row in store.get_table(ref).to_pylist():
                    found[key_of(row)].append(row)
    return found


def _asked(rows: Sequence[Row], decode: Decode | None) -> Asked:
    first = rows[0]
    tokens = first["prompt_tokens"]
    prompt = first["prompt_id"] if decode is None else decode(tokens[-MOST_PROMPT_TOKENS:])
    if len(prompt) > MOST_PROMPT_CHARACTERS or (decode is not None and len(tokens) > MOST_PROMPT_TOKENS):
        prompt = f"\u2026{prompt[-MOST_PROMPT_CHARACTERS:]}"
    # A run that generates ahead compares few: those come first.
    shown = sorted(rows, key=lambda row: row["trained"] is None)[:SAMPLES]
    return Asked(first["step"], prompt, [_completion(row, decode) for row in shown])


def _completion(row: Row, decode: Decode | None) -> ShownCompletion:
    shown, unverified = row["tokens"][:MOST_TOKENS], row["trained"] is None
    complete = partial(ShownCompletion, reward=row["reward"], advantage=row["advantage"], unverified=unverified)
    if decode is None:
        # The tokens of a part of the text are not known.
        return complete(pieces=[Piece(row["text"][:MOST_CHARACTERS], None)], left_out=0, turns=_told(row))
    trained = repeat(None) if unverified else row["trained"]
    pieces = [
        Piece(text, level_of(p - g) if written and p is not None else None)
        for text, p, g, written in zip(_texts(shown, decode), trained, row["logprobs"], row["written"], strict=False)
    ]
    left_out, turns = len(row["tokens"]) - len(shown), list(_shown_turns(row, pieces))
    return complete(pieces=list(_joined(pieces)), left_out=left_out, turns=turns)


def _shown_turns(row: Row, pieces: Sequence[Piece]) -> Iterator[ShownTurn]:
    """Policy and environment in turn, as far as there are pieces, one for each token."""
    for turn in row["turns"]:
        begin, end, after = turn["begin"], turn["end"], turn["observation_end"]
        if turn["turn"] and begin < len(pieces):
            yield ShownTurn(f"policy, turn {turn['turn']}", _note(row, turn), list(_joined(pieces[begin:end])))
        if end < min(after, len(pieces)):
            yield ShownTurn("environment", "", list(_joined(pieces[end:after])))


def _told(row: Row) -> list[ShownTurn]:
    shown = []
    for turn in row["turns"]:
        if turn["turn"]:
            text = Piece(turn["text"][:MOST_CHARACTERS], None)
            shown.append(ShownTurn(f"policy, turn {turn['turn']}", _note(row, turn), [text]))
            if turn["said"]:
                shown.append(ShownTurn("environment", "", [Piece(said_text(turn)[:MOST_CHARACTERS], None)]))
    return shown


def said_text(turn: Row) -> str:
    said = json.loads(turn["said"] or "[]")
    messages = said["messages"] if isinstance(said, dict) else said
    return "\n".join(str(message["content"]) for message in messages)


def turn_mismatch(row: Row, turn: Row) -> tuple[float, int] | None:
    """The largest |log p - log g| of a turn's tokens, and how many differ; None where they were not compared."""
    if row["trained"] is None:
        return None
    tokens = slice(turn["begin"], turn["end"])
    apart = [abs(p - g) for p, g in zip(row["trained"][tokens], row["logprobs"][tokens], strict=True)]
    return max(apart, default=0.0), sum(value != 0 for value in apart)


def _note(row: Row, turn: Row) -> str:
    found = turn_mismatch(row, turn)
    calls = len(json.loads(turn["calls"] or "[]"))
    words = [
        counted(calls, "call") + (f", {turn['failed']} failed" if turn["failed"] else ""),
        "not compared" if found is None else f"largest difference {found[0]:.3g}, {found[1]} tokens differ",
        *([f"reward {turn['reward']:g}"] if turn["reward"] else []),
        *([f"malformed: {turn['malformed']}"] if turn["malformed"] else []),
        *([f"{turn['outcome']}: {turn['detail']}".rstrip(": ")] if turn["outcome"] else []),
    ]
    return "; ".join(words)


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
    """Pieces of which neighbours without a colour are one."""
    for (level, number), some in groupby(
        enumerate(pieces), lambda found: (found[1].level, 0 if not found[1].level else 1 + found[0])
    ):
        text = "".join(piece.text for _, piece in some)[:MOST_CHARACTERS]
        if text or number:
            yield Piece(text, level)


def _decoder(view: RunView, missing: list[str]) -> Decode | None:
    """The tokenizer of the newest checkpoint that is in the run's folder; None without one that can be read."""
    entries = [entry for _, entry in view.entries if isinstance(entry, CheckpointEntry)]
    folders = [view.folder / entry.uri / POLICY for entry in reversed(entries)]
    path = next((folder / "tokenizer.json" for folder in folders if folder.is_dir()), None)
    if path is None:
        return None
    try:
        for place in (*path.parents[:3], *path.parent.iterdir()):
            refuse_link(place)
        tokenizer = Tokenizer.load(path.parent)
    except UserError as error:
        missing.append(str(error).removeprefix(f"{view.folder}/"))
        return None
    return tokenizer.decode
