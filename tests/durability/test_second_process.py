"""Two processes on one run."""

import socket
import time

import pytest

LIMIT_SECONDS = 60


class Hold:
    """Stays where it is once a thing has become durable."""

    def __init__(self, what):
        self._what = what

    def before(self, what):
        pass

    def after(self, what):
        self.note(durable=what)
        if what == self._what:
            time.sleep(LIMIT_SECONDS)


@pytest.fixture
def holding(new_training):
    """A run whose process has stopped in the middle of a step, alive."""
    training = new_training("held")
    training.begin(watch=Hold("2 rollout"))
    deadline = time.monotonic() + LIMIT_SECONDS
    while {"durable": "2 rollout"} not in training.notes():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    yield training
    if not training.lives:
        training.kill()
        training.end()


def test_the_second_is_refused_at_once_and_a_kill_frees_the_run(new_training, whole, holding):
    before = (holding.folder / "ledger.jsonl").read_bytes()
    second = new_training("held")
    began = time.monotonic()
    error = second.live().error
    assert f"{holding.folder} is in use by process {holding.pid} on {socket.gethostname()}" in error
    assert time.monotonic() - began < 5
    assert (holding.folder / "ledger.jsonl").read_bytes() == before
    holding.kill()
    assert holding.end().killed
    assert holding.live().finished
    holding.must_equal(whole)
    holding.must_have_committed_once(whole)
