import json

import pytest

from fp8core.config.load import load_config
from fp8core.config.precision import PrecisionContract, SidePrecision
from fp8core.errors import UserError
from fp8core.evaluation.problems import all_problems, contract_in, heldout_problems


@pytest.fixture
def config(tmp_path):
    rows = [{"question": f"What is {n % 20} and 1?", "answer": f"#### {n + 1}"} for n in range(30)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_config("gsm8k", {"model": "any", "data.source": str(tmp_path / "rows.jsonl"), "evaluation.prompts": 1})


def test_every_question_is_asked_once_in_an_order_that_the_file_does_not_decide(config):
    problems = all_problems(config, None)
    assert len(problems) == 20
    assert [row.prompt_id for row in problems] == sorted(row.prompt_id for row in problems)
    assert {row.question: row.reference for row in problems}["What is 3 and 1?"] == "#### 4"
    assert all_problems(config, 5) == problems[:5]
    with pytest.raises(UserError, match=r"rows\.jsonl: prompts=21, but there are only 20 different questions"):
        all_problems(config, 21)


def test_heldout_problems_are_those_of_the_training(config):
    tiny = load_config("tiny", {"evaluation.prompts": 3})
    assert len(heldout_problems(tiny)) == 3
    with pytest.raises(UserError, match="the chain task has no rows"):
        all_problems(tiny, None)


def test_a_precision_changes_the_rollout_side_alone():
    contract = PrecisionContract(rollout=SidePrecision(kv_cache="bf16", head="bf16"), bf16_last_layers=1)
    assert contract_in("configured", contract) == contract
    fp8, bf16 = (contract_in(name, contract) for name in ("fp8", "bf16"))
    assert (fp8.rollout.linear, fp8.rollout.kv_cache, fp8.rollout.head) == ("fp8_block", "fp8", "bf16")
    assert (bf16.rollout.linear, bf16.rollout.kv_cache, bf16.rollout.head) == ("bf16", "bf16", "bf16")
    assert (fp8.bf16_last_layers, fp8.training) == (1, contract.training)
