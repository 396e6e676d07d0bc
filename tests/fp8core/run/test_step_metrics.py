"""A difference is told of the turns that wrote its tokens."""

import pyarrow as pa

from fp8core.metrics.episodes import mismatch_by_turn


def test_a_difference_is_told_of_the_turns_that_wrote_its_tokens():
    """Completions that are not compared, and tokens of the environment, have no part in it."""
    # Tokens of turns 1 to 4, each with its answer.
    ranges = {0: [(0, 2, 3), (3, 4, 6), (6, 9, 9)], 1: [(0, 1, 2), (2, 3, 4), (4, 5, 6), (6, 7, 7)], 2: [(0, 2, 2)]}
    turns = [{"group": 0, "sample": sample, "turn": 0, "begin": 0, "end": 0} for sample in ranges]
    turns += [
        {"group": 0, "sample": sample, "turn": number, "begin": begin, "end": end}
        for sample, rows in ranges.items()
        for number, (begin, end, _) in enumerate(rows, start=1)
    ]
    sampled = [[-1.0] * rows[-1][2] for rows in ranges.values()]
    trained = [[*row] for row in sampled]
    trained[0][2] = -9.0  # What the environment said.
    trained[0][3] = -1.25  # Turn 2.
    trained[0][7], trained[0][8] = -1.5, -0.25  # Turn 3.
    trained[1][6] = -3.0  # Turn 4.
    trained[2][0] = -9.0  # Not compared.
    tables = [pa.table({"logprobs": pa.array(rows, pa.list_(pa.float32()))}) for rows in (sampled, trained)]
    assert mismatch_by_turn(turns, *tables, {(0, 0): 0, (0, 1): 1}) == {
        "alignment/logprob_abs_diff_max_turn_1": 0.0,
        "alignment/logprob_abs_diff_max_turn_2_3": 0.75,
        "alignment/logprob_abs_diff_max_turn_4_7": 2.0,
        "alignment/tokens_differing_turn_1": 0.0,
        "alignment/tokens_differing_turn_2_3": 3.0,
        "alignment/tokens_differing_turn_4_7": 1.0,
    }
