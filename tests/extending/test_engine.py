"""The engine of docs/extending.md generates the rollouts of a training."""


def test_the_engine_of_the_page_generates(example, loop_run, small):
    folder = example("An engine")
    run = loop_run("timed", str(folder / "timed.yaml"), **small, steps=1)
    assert run.records[-1]["executed"]["rollout"]["engine"] == "timed"
