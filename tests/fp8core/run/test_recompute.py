"""What must run again for a damaged file is found without running anything."""

from fp8core.run.loop import begin
from fp8core.run.recompute import RunAgain, TrainerAt, producer_of, recompute_if_damaged, work_before, work_needed


def test_the_work_for_damaged_files_is_listed_before_any_is_done(run_copy):
    for artifact in ("prompts", "rollouts", "next_policy"):
        run_copy.file(3, artifact).unlink()
    with run_copy.opened() as run:
        begin(run)
        prompts, rollout, train = (producer_of(run, artifact) for artifact in ("prompts", "rollouts", "next_policy"))
        assert run.trainer.version == 4
        assert work_needed(run, 3, train) == [TrainerAt(2), TrainerAt(3)]
        assert work_before(run, RunAgain(3, train)) == [TrainerAt(2)]
        assert work_needed(run, 3, rollout) == [RunAgain(3, rollout)]
        assert work_before(run, RunAgain(3, rollout)) == [RunAgain(3, prompts)]
        assert work_before(run, RunAgain(3, prompts)) == []
        assert run.trainer.version == 4
        assert not run_copy.file(3, "prompts").exists()

        assert recompute_if_damaged(run, 3, prompts)
        assert work_before(run, RunAgain(3, rollout)) == [TrainerAt(2)], "it is generated with the policy before step 3"
        assert recompute_if_damaged(run, 3, rollout)
        assert run.trainer.version == 2
        assert not recompute_if_damaged(run, 3, rollout)
        assert recompute_if_damaged(run, 3, train)
        assert run.trainer.version == 3
        assert work_needed(run, 3, train) == []
