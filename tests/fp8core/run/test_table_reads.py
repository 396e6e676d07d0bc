"""Tables of a step in memory, from the task that makes them to the last that reads them."""

from collections import Counter

from fp8core.run.loop import train
from fp8core.store import artifacts
from fp8core.store.tables import read_table


def test_every_table_of_a_step_is_parsed_once(whole_run, tmp_path, monkeypatch):
    run, parsed = whole_run.copy(tmp_path), Counter()

    def counted(source, kind, place, columns=None):
        parsed[kind] += 1
        return read_table(source, kind, place, columns)

    monkeypatch.setattr(artifacts, "read_table", counted)
    with run.opened(steps=6) as live:
        train(live)
        assert parsed == dict.fromkeys(("prompts", "rollouts", "rewards", "logprobs"), 2)
