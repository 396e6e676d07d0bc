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
