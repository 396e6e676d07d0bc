"""The text of an evaluation."""

from fp8core.evaluation.measure import EvaluationResult, measure, paired_differences, score_prompt
from fp8core.report.text import evaluation_text
from fp8core.rewards.scorer import RIGHT, scorer_crash, wrong


def test_an_evaluation_says_every_estimate_difference_and_outcome():
    first, second = (
        measure([score_prompt(f"p{i}", each, (1, 2)) for i, each in enumerate(prompts)], [3, 4, 5, 6], 0, ["a", "b"])
        for prompts in (
            [[RIGHT, RIGHT], [wrong("answer 1"), RIGHT]],
            [[RIGHT, wrong("answer 2")], [wrong("answer 1"), scorer_crash("oops")]],
        )
    )
    result = EvaluationResult(
        target="mine", step=7, weights_digest=None, config="tiny", data="chain", data_digest="0", prompts=2, samples=2,
        temperature=0.5, max_new_tokens=8, seed=0, verifier={"verifier": "chain"},
        precisions={"bf16": first, "fp8": second}, engines={},
        differences={"fp8": paired_differences(first, second, 0)},
    )  # fmt: skip
    rows = {line[:10].strip(): line.split() for line in evaluation_text(result).splitlines()}
    assert {"0.7500", "[0.2500,", "1.0000]"} <= set(evaluation_text(result).split())
    assert rows["fp8 - bf16"][3:6] == ["-0.5000", "[-0.8750,", "+0.6250]"], "two prompts say little"
    assert (rows["bf16, a"][2], rows["bf16, b"][2]) == ("1.0000", "0.5000"), "each source has a prompt"
    assert rows["fp8"] == ["fp8", "1", "2", "0", "0", "1", "4.5"]
