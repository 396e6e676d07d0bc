"""Bounds on alignment in the flow: Prefect's state and an MLflow tag name the one that was crossed."""

MISMATCHED = {"precision.training.linear": "bf16", "alignment.stop.error": 1.0, "alignment.stop.patience": 2}
REASON = "alignment.stop.error=1: above it for 2 steps in a row"


def test_a_paused_run_says_why_and_is_continued(launch) -> None:
    paused = launch("too-far", steps=3, overrides={**MISMATCHED, "alignment.stop.action": "pause"})
    assert paused.state.is_paused()
    assert paused.state.message.startswith(f"paused after step 2: {REASON}")
    known = paused.mlflow_run()
    assert known.info.status == "KILLED"
    assert known.data.tags["bound_crossed"].startswith(REASON)
    assert known.data.tags["bound_crossed"].endswith("; pause after step 2")
    assert "2 of 3 steps" in (paused.folder / "report.html").read_text()
    continued = launch("too-far", steps=3, overrides={**MISMATCHED, "alignment.stop.action": "pause"})
    assert continued.state.is_completed()
    assert continued.mlflow_run().info.status == "FINISHED"


def test_the_summary_names_the_bound_that_was_crossed_after_it_was_loosened(launch) -> None:
    paused = launch("loosened", steps=2, overrides={**MISMATCHED, "alignment.stop.action": "pause"})
    assert paused.state.is_paused()
    summary = launch("loosened", steps=3, overrides={**MISMATCHED, "alignment.stop.error": 9.0}).summary
    assert summary["bounds_crossed"] == 1
    assert summary["bounds"].startswith(
        "alignment.stop.error=1; at the end mismatched contract, fails if for 2 steps in a row tmpe > 9"
    )


def test_a_run_that_fails_by_a_bound_says_so(launch) -> None:
    failed = launch("far-too-far", steps=3, overrides={**MISMATCHED, "alignment.stop.action": "fail"})
    assert failed.state.is_failed()
    assert failed.state.message.startswith(f"failed after step 2: {REASON}")
    assert failed.mlflow_run().info.status == "FAILED"
