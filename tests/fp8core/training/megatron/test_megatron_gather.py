"""Which process sends what, on grids whose processes are not here; that it arrives is tested with several processes."""

from collections import Counter

import pytest

from fp8core.training.megatron.gather import senders
from fp8core.training.megatron.names import Place

DENSE, EXPERT = "layers.0.linear", "layers.0.experts.0"


def grid(*places):
    """As the processes of a grid say it: all hold a dense tensor and an expert."""
    return [(Place(*place), {DENSE: None, EXPERT: None}) for place in places]


@pytest.mark.parametrize(
    ("places", "dense", "experts"),
    [
        ([(0, 0, 0), (0, 0, 1), (0, 0, 2)], [0], [0, 1, 2]),
        ([(0, 0, 0), (1, 0, 0), (0, 0, 0), (1, 0, 0)], [0, 1], [0]),
        # Of two GPUs that share linears and experts there are not all combinations.
        ([(0, 0, 0), (1, 0, 1)], [0, 1], [0, 1]),
        ([(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)], [0, 2], [0, 1, 2, 3]),
    ],
    ids=["experts", "linears, twice", "both", "stages of experts"],
)
def test_everything_is_sent_once_by_the_first_that_holds_it(places, dense, experts):
    sent = list(senders(grid(*places)))
    assert sorted(rank for rank, name in sent if name == DENSE) == dense
    assert sorted(rank for rank, name in sent if name == EXPERT) == experts
    assert max(Counter(sent).values()) == 1
