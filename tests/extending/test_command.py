"""The command of docs/extending.md reads a run."""


def test_the_command_of_the_page_prints_a_line_for_each_step(changed_package, whole_run):
    run = changed_package("A command")
    lines = run("-m", "flows.cli", "lengths", str(whole_run.folder)).splitlines()
    table = whole_run.store.get_table(whole_run.ledger.artifacts(4)["rollouts"])
    longest = max(len(tokens) for tokens in table["tokens"].to_pylist())
    assert [line.split(":")[0] for line in lines] == ["step 1", "step 2", "step 3", "step 4"]
    assert lines[-1] == f"step 4: {longest} tokens"
