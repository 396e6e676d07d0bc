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
from itertools import zip_longest
from pathlib import Path
from typing import Any

from fp8core.errors import UserError
from fp8core.models.tokenizer import Tokenizer
from fp8core.rewards.scorer import Key
from fp8core.store.artifacts import ArtifactError, ArtifactStore, Ref
from fp8core.store.layout import POLICY
from fp8core.store.ledger import START, CheckpointEntry
from fp8core.store.run_view import Commit, RunView
from fp8core.store.tables import COMPLETION_KEY, HeldoutSample, key_of, keys_of

PROMPTS = 4
SAMPLES = 2
HELDOUT_PROMPTS = 4
_MOST_TOKENS = 160
_MOST_CHARACTERS = 800
_MOST_PROMPT_CHARACTERS = 3200
_MOST_FACT_CHARACTERS = 60
_THRESHOLDS = (1e-3, 1e-2, 1e-1)
LEGEND = ("below 0.001", "0.001 to 0.01", "0.01 to 0.1", "0.1 and more")
_COLUMNS = (*COMPLETION_KEY, "prompt_id", "prompt_tokens", "tokens", "logprobs", "written", "text")
_SCORE_COLUMNS = {"reward": "rewards", "outcome": "rewards", "detail": "rewards", "advantage": "advantages"}
"""What is shown of a completion -> the kind of the table that has it; of several tables of a step the last."""

Decode = Callable[[Sequence[int]], str]
Row = dict[str, Any]


@dataclass(frozen=True)
class Piece:
    """Text of one token or several; level 0: equal bit for bit, 1 to 4: as in `LEGEND`, None: not compared."""

    text: str
    level: int | None


@dataclass(frozen=True)
class ShownCompletion:
    """A text of the policy; `left_out` tokens are not shown, `unverified`: its log-probs were not computed again."""

    reward: float | None
    pieces: Sequence[Piece]
    left_out: int = 0
    has_no_logprobs: bool = False
    advantage: float | None = None
    outcome: str | None = None


@dataclass(frozen=True)
class PromptExamples:
    """Completions of a prompt; `facts` are its answer and the columns of its row."""

    step: int
    prompt: str
    completions: Sequence[ShownCompletion]
    facts: str = ""

    @property
    def differing(self) -> bool:
        return any(piece.level for completion in self.completions for piece in completion.pieces)


Examples = Sequence[PromptExamples]
"""Early and late in turn."""


def is_removed(view: RunView, ref: Ref) -> bool:
    return ref.digest in view.removed_digests and not (view.folder / ref.uri).exists()


def unread(what: str, step: int, error: ArtifactError, folder: Path) -> str:
    """A line about a file of a step that cannot be read, with its place in the run's folder."""
    place, _, reason = str(error).removeprefix(f"{folder}/").partition(": ")
    return f"{what} of step {step}: {reason} ({place})"


def pick_completions(view: RunView, names: tuple[str, str], missing: list[str]) -> list[list[Row]]:
    """By prompt the rows of its completions, with log-probs of both policies and the reward, early and late in turn.

    They are of the first and the last step that have the artifacts `names`: with rollouts and with log-probs.
    """
    whole = [commit for commit in _in_order(view) if commit.step > START and _is_there(view, commit, names)]
    ends = whole[:1] + whole[1:][-1:]
    groups = [[*_read(view, commit, names, missing).values()] for commit in ends]
    groups_to_show = [sorted(some, key=_order)[:PROMPTS] for some in groups]
    return [rows for pair in zip_longest(*groups_to_show) for rows in pair if rows is not None]


def _order(group: Sequence[Row]) -> tuple[int, bool]:
    """A run that generates ahead compares a share of its completions; equal rewards teach nothing."""
    return sum(row["trained"] is None for row in group), len({row["reward"] for row in group}) == 1


def read_examples(view: RunView, names: tuple[str, str], missing: list[str]) -> Examples:
    """The completions that a report shows (arguments: `pick_completions`)."""
    choice = pick_completions(view, names, missing)
    decode = _decoder(view, missing) if choice else None
    return [_prompt_examples(rows, decode) for rows in choice]


def heldout_examples(view: RunView, missing: list[str]) -> Examples:
    """The texts that the first and the last evaluation keep of held-out prompts; none before there are two."""
    commits = _in_order(view)
    first, last = (_first_evaluation(view, order, missing) for order in (commits, commits[::-1]))
    if first is None or last is None or first[0] == last[0]:
        return []
    names = [name for name in first[1] if name in last[1]][:HELDOUT_PROMPTS]
    samples = [(step, by[name]) for name in names for step, by in (first, last)]
    return [
        PromptExamples(step, one.prompt, [ShownCompletion(one.score, [Piece(one.text, None)])]) for step, one in samples
    ]


def _first_evaluation(
    view: RunView, commits: Sequence[Commit], missing: list[str]
) -> tuple[int, dict[str, HeldoutSample]] | None:
    """Step and samples, by prompt_id, of the first of these commits that evaluated, if it kept any."""
    for commit in commits:
        for ref in commit.artifacts.values():
            if ref.kind != "evaluation" or is_removed(view, ref):
                continue
            try:
                content = ArtifactStore(view.folder).get_json(ref)
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


def _in_order(view: RunView) -> list[Commit]:
    return sorted(view.commits, key=lambda commit: commit.step)


def _is_there(view: RunView, commit: Commit, names: tuple[str, str]) -> bool:
    refs = [commit.artifacts.get(name) for name in names]
    return all(ref is not None and not is_removed(view, ref) for ref in refs)


def _read(view: RunView, commit: Commit, names: tuple[str, str], missing: list[str]) -> dict[str, list[Row]]:
    """By prompt a row for each completion of a step; `trained` is None where log-probs were not compared."""
    store = ArtifactStore(view.folder)
    rollouts, scored = (commit.artifacts[name] for name in names)
    scores: dict[Key, Row] = defaultdict(lambda: dict.fromkeys(_SCORE_COLUMNS))
    facts: dict[str, str] = {}
    try:
        rows = store.get_table(rollouts, _COLUMNS).to_pylist()
        table = store.get_table(scored, [*COMPLETION_KEY, "logprobs"])
        for ref in commit.artifacts.values():
            if ref.kind == "prompts" and not is_removed(view, ref):
                facts |= {row["prompt_id"]: _facts(row) for row in store.get_table(ref).to_pylist()}
            if (columns := [name for name, kind in _SCORE_COLUMNS.items() if kind == ref.kind]) and not is_removed(
                view, ref
            ):
                for row in store.get_table(ref, [*COMPLETION_KEY, *columns]).to_pylist():
                    scores[key_of(row)] |= row
    except ArtifactError as error:
        missing.append(unread("completions", commit.step, error, view.folder))
        return {}
    training_logprobs = dict(zip(keys_of(table), table["logprobs"].to_pylist(), strict=True))
    by_prompt: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        key = key_of(row)
        more = {"step": commit.step, "trained": training_logprobs.get(key), "facts": facts.get(row["prompt_id"], "")}
        by_prompt[row["prompt_id"]].append({**row, **scores[key], **more})
    return by_prompt


def _facts(prompt: Row) -> str:
    values = {"answer": prompt["reference"], **json.loads(prompt.get("columns") or "{}")}
    return ", ".join(f"{name} {str(value)[:_MOST_FACT_CHARACTERS]}" for name, value in values.items())


def _prompt_examples(rows: Sequence[Row], decode: Decode | None) -> PromptExamples:
    first = rows[0]
    prompt = first["prompt_id"] if decode is None else decode(first["prompt_tokens"])
    if len(prompt) > _MOST_PROMPT_CHARACTERS:
        prompt = f"\u2026{prompt[-_MOST_PROMPT_CHARACTERS:]}"
    # A run that generates ahead compares few: those come first, and then those of another reward.
    first_of = {row["reward"]: row for row in reversed(rows)}
    shown = sorted(rows, key=lambda row: (row["trained"] is None, row is not first_of[row["reward"]]))[:SAMPLES]
    return PromptExamples(first["step"], prompt, [_completion(row, decode) for row in shown], first["facts"])


def _completion(row: Row, decode: Decode | None) -> ShownCompletion:
    has_no_logprobs = row["trained"] is None
    if decode is None:
        # The tokens of a part of the text are not known.
        whole = [Piece(row["text"][:_MOST_CHARACTERS], None)]
        return ShownCompletion(row["reward"], whole, 0, has_no_logprobs, row["advantage"], row["outcome"])
    shown = row["tokens"][:_MOST_TOKENS]
    training_logprobs = row["trained"] or [None] * len(shown)
    pieces = [
        Piece(text, level_of(p - g) if written and p is not None else None)
        for text, p, g, written in zip(
            _texts(shown, decode), training_logprobs, row["logprobs"], row["written"], strict=False
        )
    ]
    left_out = len(row["tokens"]) - len(shown)
    return ShownCompletion(row["reward"], pieces, left_out, has_no_logprobs, row["advantage"], row["outcome"])


def level_of(difference: float) -> int:
    return 0 if difference == 0 else 1 + bisect_right(_THRESHOLDS, abs(difference))


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
