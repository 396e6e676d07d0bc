"""SIGKILL at random instants, seeds fixed."""

import random

import pytest

pytestmark = pytest.mark.slow

# Steps between checkpoints, and the longest life as a share of the work of an uninterrupted run. A life redoes none,
# one or all of the steps before it gets further.
LIVES = {1: 0.45, 2: 0.45, 100: 0.9}


@pytest.fixture(scope="module")
def whole_of(new_training):
    """Uninterrupted runs by the steps between their checkpoints."""
    wholes = {}

    def of(every):
        if every not in wholes:
            wholes[every] = new_training(f"whole {every}", **{"checkpoint.every": every})
            assert wholes[every].live().finished
        return wholes[every]

    return of


@pytest.mark.parametrize("every", LIVES)
@pytest.mark.parametrize("seed", range(6))
def test_a_run_killed_at_random_instants_equals_one_that_was_not(new_training, whole_of, tmp_path, seed, every):
    whole, instants = whole_of(every), random.Random(f"{seed}/{every}")
    training = new_training("run", runs=tmp_path, **{"checkpoint.every": every})
    longest = LIVES[every] * whole.lives[0].seconds
    while training.live(seconds=instants.uniform(0, longest)).killed:
        assert len(training.lives) < 50, "the run gets nowhere"
    training.must_equal(whole)
    training.must_have_committed_once(whole)
