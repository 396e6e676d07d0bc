"""A task as an environment gets it."""

import json

import pytest

from fp8core.run.turns import task_of


@pytest.mark.parametrize(("seed", "told"), [(0, 0), (2**63 - 1, 2**63 - 1), (-1, 2**64 - 1), (-(2**63), 2**63)])
def test_the_seed_of_a_task_has_no_sign(seed: int, told: int) -> None:
    row = {"messages": json.dumps([("system", "Be brief."), ("user", "3*4")]), "reference": "12"}
    assert task_of(row, seed).seed == told
