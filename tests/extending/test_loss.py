"""The loss of docs/extending.md trains, and a wrong option is one line."""

import hashlib

import pytest

from fp8core.config.load import load_config
from fp8core.errors import UserError
from fp8core.rl.user_loss import load_loss


def test_the_loss_of_the_page_trains(example, loop_run, small):
    folder = example("A loss")
    config = str(folder / "sharp.yaml")
    run = loop_run("sharp", config, **small, steps=1)
    source = hashlib.sha256((folder / "my_loss.py").read_bytes()).hexdigest()
    assert run.records[-1]["executed"]["loss"] == {"source": source}
    with pytest.raises(UserError, match=r"^loss.options.power: "):
        load_loss(load_config(config).loss.policy, {"power": 0})
