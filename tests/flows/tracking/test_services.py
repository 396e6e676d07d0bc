"""Several services at once, and one that is missing."""

import sys
from types import SimpleNamespace

from flows.cli import main
from flows.tracking.record import read_record
from flows.tracking.tracker import Outage, Tracker, TrackerEntry


class AwayTracker(Tracker):
    title = "Away"
    uri = "nowhere"

    def start(self, settings):
        raise Outage("nobody is here")


def test_an_outage_of_one_service_holds_back_no_other(copy_of_trained, monkeypatch) -> None:
    entry = TrackerEntry(lambda training, known: AwayTracker())
    monkeypatch.setitem(sys.modules, "away_service", SimpleNamespace(TRACKER=entry))
    monkeypatch.setattr("flows.tracking.session.RETRY_SECONDS", 0.05)
    monkeypatch.setattr("flows.tracking.session.OUTAGE_PATIENCE_SECONDS", 0.3)
    copy = copy_of_trained("sqlite:///", services=("away_service:TRACKER", "tensorboard"))
    said = copy.publish()
    assert said.count("Away does not answer (nobody is here); metrics stay in the ledger and follow\n") == 1
    assert "Away lacks them; steps 0 to 3 will follow: fp8-grpo resume" in said
    services = read_record(copy.folder).services
    assert {name: each.published for name, each in services.items()} == {"away_service:TRACKER": -1, "tensorboard": 3}


def test_a_missing_package_is_one_line(monkeypatch, capsys) -> None:
    monkeypatch.setattr("flows.tracking.tracker.find_spec", lambda name: None)
    assert main(["run", "tiny", "--set", "tracking=[wandb]"]) == 2
    told = capsys.readouterr().err
    assert "tracking.services=wandb: wandb is not installed (pip install 'fp8-grpo[wandb]')" in told
