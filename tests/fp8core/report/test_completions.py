"""Completions on the page: which are chosen, what has a colour, and that their text is no markup."""

import re

import pyarrow as pa

from fp8core.report.completions import HELDOUT_PROMPTS, PROMPTS, SAMPLES
from fp8core.report.pages import report_html
from fp8core.report.run_data import read_run
from fp8core.store.artifacts import Ref
from fp8core.store.tables import COLUMNS


def rewrite(run_copy, kind: str, change, *columns: pa.Field) -> None:
    """Change every row of the tables of a kind, step by step; `columns` are new ones."""

    def replaced(entry) -> None:
        for name, ref in entry.get("outputs", {}).items() if entry["event"] == "task" else ():
            if ref["kind"] == kind:
                table = run_copy.store.get_table(Ref.model_validate(ref))
                rows = table.to_pylist()
                for row in rows:
                    change(entry["step"], row)
                new = run_copy.store.put_table(
                    kind, table.from_pylist(rows, schema=pa.schema([*table.schema, *columns]))
                )
                entry["outputs"][name] = new.model_dump()

    run_copy.rewrite(replaced)


def texts(completion) -> list[str]:
    return ["".join(piece.text for piece in completion.pieces)]


def section(page: str) -> str:
    return page.partition('<section id="completions">')[2].partition("</section>")[0]


def test_nothing_has_a_colour_where_the_policies_are_equal_and_tokens_have_one_where_not(whole_run, mixed_run) -> None:
    equal, different = (section(report_html([read_run(run.folder, "run")])) for run in (whole_run, mixed_run))
    assert "equal bit for bit under both policies, so none has a colour" in equal
    assert "<mark" not in equal
    # Each colour is in the legend once.
    assert different.count("<mark") > 4


def test_of_a_run_that_generates_ahead_a_share_is_compared_with_the_writers_of_its_tokens(loop_run) -> None:
    """The log-probs before the update are of a newer policy, so they would show its lag."""
    pipeline = {"mode": "asynchronous", "ahead_tokens": 3, "chunk_tokens": 3, "verified_share": 0.0625}
    run = loop_run("ahead", pipeline=pipeline, **{"training.learning_rate": 1e-3})
    data = read_run(run.folder, "run")
    assert not data.damage_lines
    completions = [done for asked in data.examples for done in asked.completions]
    assert {done.has_no_logprobs for done in completions} == {False, True}
    for done in completions:
        assert {piece.level for piece in done.pieces} == {None if done.has_no_logprobs else 0}
    assert report_html([data]).count(", not compared</p>") == sum(done.has_no_logprobs for done in completions)


def test_early_and_late_steps_with_their_rewards_and_the_text_of_the_tokens(run_copy) -> None:
    rewrite(run_copy, "rewards", lambda step, row: row.update(reward=100.0 + step))
    examples = read_run(run_copy.folder, "run").examples
    early, late = examples[::2], examples[1::2]
    for some, step in ((early, 1), (late, 4)):
        assert [one.step for one in some] == [step] * PROMPTS
        assert [done.reward for one in some for done in one.completions] == [100.0 + step] * PROMPTS * SAMPLES
    rewrite(run_copy, "prompts", lambda step, row: row.update(reference="6", columns='{"level": "hard"}'), COLUMNS)
    assert {one.facts for one in read_run(run_copy.folder, "run").examples} == {"answer 6, level hard"}
    stored = run_copy.store.get_table(run_copy.ledger.artifacts(1)["rollouts"]).to_pylist()[0]
    assert texts(early[0].completions[0]) == [stored["text"]]


def test_groups_whose_rewards_differ_come_first_and_show_both(run_copy) -> None:
    table = run_copy.store.get_table(run_copy.ledger.artifacts(1)["rewards"])
    group = max(table["group"].to_pylist())

    def change(step, row) -> None:
        row["reward"] = float(row["group"] == group and row["sample"] == 3)

    rewrite(run_copy, "rewards", change)
    first, *others = read_run(run_copy.folder, "run").examples[::2]
    assert [done.reward for done in first.completions] == [0.0, 1.0]
    assert {done.reward for one in others for done in one.completions} == {0.0}


def test_held_out_prompts_are_the_same_ones_at_the_first_and_the_last_evaluation(run_copy) -> None:
    steps = [step for step in run_copy.ledger.steps() if run_copy.store.get_json(evaluation(run_copy, step))]
    data = read_run(run_copy.folder, "run")
    for shown, step in ((data.heldout[::2], steps[0]), (data.heldout[1::2], steps[-1])):
        samples = run_copy.store.get_json(evaluation(run_copy, step))["samples"][:HELDOUT_PROMPTS]
        assert [(one.step, one.prompt, done.reward, *texts(done)) for one in shown for done in one.completions] == [
            (step, sample["prompt"], sample["score"], sample["text"]) for sample in samples
        ]
    body = report_html([data]).partition("held-out prompts</h3>")[2].partition("<h3>")[0]
    assert len(re.findall('<pre class="prompt">', body)) == 2 * HELDOUT_PROMPTS


def evaluation(run, step: int) -> Ref:
    return run.ledger.artifacts(step)["evaluation"]
