"""Turns of episodes as a table: what no step writes is one line with the column."""

import json
from typing import Any

import pyarrow as pa
import pytest

from fp8core.errors import StoredFileError
from fp8core.store.tables import TURNS, check_rows, refuse_other_turns, text_digest

LENGTHS = ((4, 2), (3, 0))
"""Of the two turns of an episode: tokens written, and observed after them."""


def turns(*changes: tuple[int, dict[str, Any]]) -> pa.Table:
    """Two episodes of two turns, the second one's last an outcome; `changes` are rows and their new values."""
    rows = []
    for sample in (0, 1):
        begin = 0
        for turn, (written, observed) in enumerate(LENGTHS):
            said = json.dumps([{"role": "tool", "content": f"{sample} {turn}"}]) if observed else ""
            rows.append(
                {
                    **{name: "" for name in ("text", "calls", "malformed", "detail", "info")},
                    **{"group": 0, "sample": sample, "turn": turn, "said": said, "observation": text_digest(said)},
                    **{"outcome": "" if observed else "right", "reward": 0.5, "failed": 0},
                    **{"begin": begin, "end": begin + written, "observation_end": begin + written + observed},
                }
            )
            begin += written + observed
    for place, values in changes:
        rows[place] |= values
    return pa.Table.from_pylist(rows, schema=TURNS)


def rollouts(written: list[bool]) -> pa.Table:
    return pa.table({"group": [0, 0], "sample": [0, 1], "written": [written] * 2})


WRITTEN = [True] * 4 + [False] * 2 + [True] * 3


def test_turns_as_they_are_written_are_sound() -> None:
    check_rows(turns(), "turns", "here")
    refuse_other_turns(rollouts(WRITTEN), turns(), "here")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ((0, {"end": 7}), "end: not between begin and observation_end"),
        ((1, {"turn": 2}), "turn: does not follow the turn before it"),
        ((3, {"begin": 5, "end": 9}), "turn: does not follow the turn before it"),
        ((0, {"outcome": "right"}), "outcome: before the last turn of an episode"),
        ((2, {"said": "[]"}), "observation: not the digest of what was said"),
        ((1, {"calls": "{}"}), "calls: not the JSON that it should be"),
        ((1, {"info": "[" * 100_000}), "info: not the JSON that it should be"),
        ((0, {"reward": float("nan")}), "reward: nan, not finite"),
        ((3, {"sample": 0, "turn": 1}), "group, sample, turn: the rows are not in this order, each once"),
        ((2, {"failed": -1}), "failed: negative"),
        ((2, {"text": None}), "text: a value is missing"),
    ],
)
def test_a_damaged_turn_is_named(change: tuple[int, dict[str, Any]], complaint: str) -> None:
    with pytest.raises(StoredFileError, match=rf"^here: {complaint}"):
        check_rows(turns(change), "turns", "here")


def test_turns_of_other_tokens_or_episodes_are_refused() -> None:
    with pytest.raises(StoredFileError, match=r"^here: end: other tokens than those written in group 0"):
        refuse_other_turns(rollouts(WRITTEN[::-1]), turns(), "here")
    with pytest.raises(StoredFileError, match=r"^here: group, sample: other episodes than the step's rollouts"):
        refuse_other_turns(rollouts(WRITTEN), turns().slice(0, 2), "here")
