"""The step of docs/extending.md changes the rewards that the update reads."""


def test_the_step_of_the_page_takes_reward_for_tokens(example, loop_run, small):
    folder = example("A step")
    run = loop_run("brief", str(folder / "brief.yaml"), **small, steps=1)
    artifacts = run.ledger.artifacts(1)
    rollouts, rewards, brief = (run.store.get_table(artifacts[name]) for name in ("rollouts", "rewards", "brief"))
    lengths = [len(tokens) for tokens in rollouts["tokens"].to_pylist()]
    expected = [reward - 0.02 * length for reward, length in zip(rewards["reward"].to_pylist(), lengths, strict=True)]
    assert brief["reward"].to_pylist() == expected
