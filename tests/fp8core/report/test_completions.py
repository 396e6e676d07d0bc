"""Completions on the page: which are chosen, what has a colour, and that their text is no markup."""

import re
import shutil
from dataclasses import replace

import pytest

from fp8core.report import completions as module
from fp8core.report.completions import HELDOUT_PROMPTS, MOST_TOKENS, PROMPTS, SAMPLES, level_of, pick_completions
from fp8core.report.pages import report_html
from fp8core.report.run_data import compared_artifacts, read_run
from fp8core.store.artifacts import Ref

HOSTILE = "<script>alert(1)</script>\u202e\x1b[2J"


def rewrite(run_copy, kind: str, change) -> None:
    """Change every row of the tables of a kind, step by step."""

    def replaced(entry) -> None:
        for name, ref in entry.get("outputs", {}).items() if entry["event"] == "task" else ():
            if ref["kind"] == kind:
                table = run_copy.store.get_table(Ref.model_validate(ref))
                rows = table.to_pylist()
                for row in rows:
                    change(entry["step"], row)
                new = run_copy.store.put_table(kind, table.from_pylist(rows, schema=table.schema))
                entry["outputs"][name] = new.model_dump()

    run_copy.rewrite(replaced)


def page_of(run_copy) -> str:
    return report_html([read_run(run_copy.folder, "run")])


def coloured(page: str) -> list[str]:
    body = page.partition('<div class="asked">')[2].partition("</section>")[0]
    return re.findall(r'<mark class="(m\d)">', body)


@pytest.mark.parametrize(
    ("difference", "level"),
    [(0.0, 0), (-0.0, 0), (1e-9, 1), (-9e-4, 1), (1e-3, 2), (0.01, 3), (-0.09, 3), (0.1, 4), (-7.0, 4)],
)
def test_a_colour_stands_for_the_size_of_the_difference(difference: float, level: int) -> None:
    assert level_of(difference) == level


def test_nothing_has_a_colour_where_the_policies_are_equal_and_tokens_have_one_where_not(whole_run, mixed_run) -> None:
    equal, different = (read_run(run.folder, "run") for run in (whole_run, mixed_run))
    assert equal.examples.compared
    assert not equal.examples.differing
    assert different.examples.differing
    assert coloured(report_html([equal])) == []
    assert coloured(report_html([different]))
    assert report_html([different]).count('class="m4"') > report_html([equal]).count('class="m4"')


def test_of_a_run_that_generates_ahead_a_share_is_compared_with_the_writers_of_its_tokens(
    loop_run, monkeypatch
) -> None:
    """The log-probs before the update are of a newer policy, so they would show its lag."""
    pipeline = {"mode": "asynchronous", "ahead_tokens": 3, "chunk_tokens": 3, "verified_share": 0.0625}
    run = loop_run("ahead", pipeline=pipeline, **{"training.learning_rate": 1e-3})
    data = read_run(run.folder, "run")
    assert not data.damaged
    completions = [done for asked in data.examples.in_order() for done in asked.completions]
    assert {done.unverified for done in completions} == {False, True}
    for done in completions:
        assert {piece.level for piece in done.pieces} == {None if done.unverified else 0}
    assert report_html([data]).count(", not compared</p>") == sum(done.unverified for done in completions)
    picked = pick_completions(data.view, compared_artifacts(data.view), [])
    assert picked is not None
    verified = [sum(row["trained"] is not None for row in rows) for rows in picked.in_order()]
    assert [sum(not done.unverified for done in asked.completions) for asked in data.examples.in_order()] == [
        min(SAMPLES, count) for count in verified
    ], "what was compared is shown first"
    bare = [
        replace(one, completions=[done for done in one.completions if done.unverified]) for one in data.examples.early
    ]
    page = report_html([replace(data, examples=replace(data.examples, early=bare, late=[]))])
    assert "None of these completions was compared." in page
    assert "tokenizer that can be read" not in page
    monkeypatch.setattr(module, "PROMPTS", 100)
    every = pick_completions(data.view, compared_artifacts(data.view), [])
    assert every is not None
    assert not every.same
    compared = [sum(row["trained"] is not None for row in rows) for rows in every.early if rows[0]["step"] == 1]
    assert len(compared) > 2
    assert compared == sorted(compared, reverse=True), "prompts with compared completions come first"


def test_early_and_late_steps_with_the_reward_of_each(run_copy) -> None:
    rewrite(run_copy, "rewards", lambda step, row: row.update(reward=100.0 + step))
    examples = read_run(run_copy.folder, "run").examples
    assert ({one.step for one in examples.early}, {one.step for one in examples.late}) == ({1}, {4})
    for some, reward in ((examples.early, 101.0), (examples.late, 104.0)):
        assert [done.reward for asked in some for done in asked.completions] == [reward] * PROMPTS * SAMPLES
    assert not examples.same


def test_the_text_is_that_of_the_tokens(whole_run) -> None:
    shown = read_run(whole_run.folder, "whole").examples.early[0].completions[0]
    stored = whole_run.store.get_table(whole_run.ledger.artifacts(1)["rollouts"]).to_pylist()[0]
    assert "".join(piece.text for piece in shown.pieces) == stored["text"]


def test_the_same_prompts_are_shown_where_they_come_back(run_copy) -> None:
    def renamed(step, row) -> None:
        row["prompt_id"] = "asked twice" if row["group"] == 2 else f"{step} {row['group']}"

    rewrite(run_copy, "rollouts", renamed)
    examples = read_run(run_copy.folder, "run").examples
    assert examples.same
    assert [one.step for one in (*examples.early, *examples.late)] == [1, 4]


def test_a_hostile_completion_is_text(run_copy) -> None:
    shutil.rmtree(run_copy.folder / "checkpoints")
    rewrite(run_copy, "rollouts", lambda step, row: row.update(text=HOSTILE, prompt_id=HOSTILE))
    page = page_of(run_copy)
    assert "<script" not in page
    assert not {"\u202e", "\x1b"} & {*page}
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;\\u202e\\x1b[2J") >= 2


def test_a_long_completion_is_cut(run_copy) -> None:
    def longer(step, row) -> None:
        for name in {"tokens", "logprobs", "written", "entropy"} & {*row}:
            row[name] = (row[name] * 3000)[:3000]

    for kind in ("rollouts", "logprobs"):
        rewrite(run_copy, kind, longer)
    before, after = read_run(run_copy.folder, "run"), page_of(run_copy)
    assert all(done.left_out == 3000 - MOST_TOKENS for asked in before.examples.early for done in asked.completions)
    assert len(after) <= 500_000


def test_a_tokenizer_behind_a_link_is_not_read(run_copy, tmp_path) -> None:
    for folder in (run_copy.folder / "checkpoints").iterdir():
        shutil.move(folder / "policy", tmp_path / folder.name)
        (folder / "policy").symlink_to(tmp_path / folder.name)
    run = read_run(run_copy.folder, "run")
    assert not run.examples.compared
    assert any("checkpoints/" in line for line in run.damaged)


def test_a_damaged_step_is_named_and_the_others_are_shown(run_copy) -> None:
    run_copy.file(1, "rewards").write_bytes(b"no table")
    run = read_run(run_copy.folder, "run")
    assert {one.step for one in run.examples.early} == {2}
    assert any(line.startswith("completions of step 1: ") for line in run.damaged)


def test_held_out_prompts_are_the_same_ones_at_the_first_and_the_last_evaluation(run_copy) -> None:
    steps = [step for step in run_copy.ledger.steps() if run_copy.store.get_json(evaluation(run_copy, step))]
    stored = [run_copy.store.get_json(evaluation(run_copy, step))["samples"] for step in steps]
    assert [len(samples) for samples in stored] == [8] * len(steps)
    found = read_run(run_copy.folder, "run").heldout
    for shown, step, samples in ((found.early, steps[0], stored[0]), (found.late, steps[-1], stored[-1])):
        assert [
            (one.step, one.prompt, done.reward, "".join(piece.text for piece in done.pieces))
            for one in shown
            for done in one.completions
        ] == [(step, sample["prompt"], sample["score"], sample["text"]) for sample in samples[:HELDOUT_PROMPTS]]
    assert [one.prompt for one in found.early] == [one.prompt for one in found.late]
    body = page_of(run_copy).partition("held-out prompts</h3>")[2].partition("<h3>")[0]
    assert body.count('<pre class="prompt">') == 2 * HELDOUT_PROMPTS


def test_a_damaged_evaluation_is_named_and_one_without_texts_shows_none(run_copy) -> None:
    changed = run_copy.store.get_json(evaluation(run_copy, 0))
    run_copy.file(4, "evaluation").write_bytes(b"no JSON")
    run = read_run(run_copy.folder, "run")
    assert {one.step for one in run.heldout.late} == {2}
    assert any(line.startswith("held-out completions of step 4: ") for line in run.damaged)
    del changed["samples"]
    older = run_copy.store.put_json("evaluation", changed)

    def replaced(entry) -> None:
        if entry["event"] == "task" and entry["step"] == 0 and "evaluation" in entry["outputs"]:
            entry["outputs"]["evaluation"] = older.model_dump()

    run_copy.rewrite(replaced)
    assert read_run(run_copy.folder, "run").heldout is None


def evaluation(run, step: int) -> Ref:
    return run.ledger.artifacts(step)["evaluation"]


def test_a_prompt_that_lacks_its_beginning_says_so(run_copy) -> None:
    def longer(step, row) -> None:
        row["prompt_tokens"] = row["prompt_tokens"] * 300 if row["group"] == 0 else row["prompt_tokens"]

    whole = [one.prompt for one in read_run(run_copy.folder, "run").examples.early]
    rewrite(run_copy, "rollouts", longer)
    cut, *others = [one.prompt for one in read_run(run_copy.folder, "run").examples.early]
    assert cut[0] == "\u2026"
    assert cut.endswith(whole[0])
    assert len(cut) > 160
    assert others == whole[1:]
