from fp8core.report.markdown import progress_markdown


def row(step: int, reward: float) -> dict[str, float]:
    return {"step": step, "reward/mean": reward, "alignment/token_mult_prob_error": 1.0}


def test_the_newest_steps_stand_beside_those_before_them() -> None:
    text = progress_markdown(
        "mine", 9, [row(3, 0.5), row(4, 0.7)], [row(1, 0.1), row(2, 0.3)], {"train": 3, "rollout": 1}
    )
    lines = text.splitlines()
    assert lines[0] == "**mine**: step 4 of 9"
    assert "|  | mean of steps 1 to 2 | mean of steps 3 to 4 |" in lines
    assert "| Reward (mean reward of the step) | 0.2 | 0.6 |" in lines
    assert "| Held-out accuracy (share of unseen prompts right) | - | - |" in lines
    assert lines[-1] == "2 s of tasks a step: train 75%, rollout 25%."
    table = [line for line in lines if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in table} == {4}


def test_the_first_report_has_one_column() -> None:
    lines = progress_markdown("mine", 9, [row(1, 0.5)], [], {}).splitlines()
    assert "|  | step 1 |" in lines
    assert not any("tasks a step" in line for line in lines)
