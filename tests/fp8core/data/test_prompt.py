import subprocess
import sys

import numpy as np

from fp8core.data.prompt import generator, is_heldout, problem


def test_a_problem_is_named_by_its_question_alone() -> None:
    assert problem("2+2=", "4").prompt_id == problem("2+2=", "5").prompt_id == "20243c49d24c4af1"
    assert problem("2+3=", "4").prompt_id != problem("2+2=", "4").prompt_id


def test_one_question_in_eight_is_held_out() -> None:
    share = np.mean([is_heldout(f"question {index}") for index in range(20_000)])
    assert abs(share - 1 / 8) < 0.01


def test_generators_differ_by_seed_purpose_and_index() -> None:
    keys = [(0, "a", 0), (1, "a", 0), (0, "b", 0), (0, "a", 1)]
    draws = {key: generator(*key).integers(0, 2**63) for key in keys}
    assert len(set(draws.values())) == len(keys)
    assert generator(0, "a", 0).integers(0, 2**63) == draws[0, "a", 0]


def test_another_process_draws_and_holds_out_the_same() -> None:
    code = (
        "from fp8core.data.prompt import generator, is_heldout; "
        "print(generator(3, 'p', 5).integers(0, 2**63), [is_heldout(str(i)) for i in range(64)])"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert printed == f"{generator(3, 'p', 5).integers(0, 2**63)} {[is_heldout(str(index)) for index in range(64)]}"
