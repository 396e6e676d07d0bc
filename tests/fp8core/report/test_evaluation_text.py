from fp8core.evaluation.measure import Counting, measure, paired_differences, score_prompt
from fp8core.evaluation.result import EvaluationResult
from fp8core.report.evaluation import evaluation_text
from fp8core.rewards.verdict import RIGHT, crashed, wrong


def test_columns_are_aligned_and_say_everything():
    counting = Counting((1, 2), 0.9, 0)
    first, second = (
        measure(
            [score_prompt(f"p{i}", verdicts, counting.k) for i, verdicts in enumerate(prompts)], [3, 4, 5, 6], counting
        )
        for prompts in (
            [[RIGHT, RIGHT], [wrong("answer 1"), RIGHT]],
            [[RIGHT, wrong("answer 2")], [wrong("answer 1"), crashed("oops")]],
        )
    )
    result = EvaluationResult(
        target="mine", step=7, weights_digest=None, config="tiny", data="chain", data_digest="0", prompts=2, samples=2,
        temperature=0.5, max_new_tokens=8, seed=0, confidence=0.9, verifier={"verifier": "chain"},
        precisions={"bf16": first, "fp8": second}, engines={},
        differences={"fp8": paired_differences(first, second, counting)},
    )  # fmt: skip
    lines = evaluation_text(result).splitlines()
    assert lines[0] == "mine, step 7: 2 prompts of chain, 2 at temperature 0.5; 90% intervals"
    assert lines[2].split() == ["precision", "pass@1", "pass@2", "maj@2"]
    assert lines[3].startswith("bf16 ")
    assert "0.7500 [0.5000, 1.0000]" in lines[3]
    assert lines[5].startswith("fp8 - bf16  -0.5000 [-0.5000, -0.5000]")
    assert lines[7].split() == ["precision", "right", "wrong", "unparsed", "timeout", "crashed", "tokens"]
    assert lines[9].split() == ["fp8", "1", "2", "0", "0", "1", "4.5"]
    assert len({len(line) for line in lines[2:6]}) == len({len(line) for line in lines[7:10]}) == 1
