"""Where engine and trainer share a device, the memory of each is there when the other needs it."""

import pytest

from fp8core.run import start
from fp8core.run.execute import carried
from fp8core.run.policy import push
from fp8core.run.scales import read_scales


@pytest.fixture
def order(monkeypatch):
    """Makes an object's method note its name when it is called; returns the names."""
    names = []

    def watch(owner, name):
        called = getattr(owner, name)

        def noted(*arguments):
            names.append(name)
            return called(*arguments)

        monkeypatch.setattr(owner, name, noted)

    return names, watch


def test_an_engine_sleeps_while_the_trainer_is_built_and_exports(run_copy, monkeypatch, order):
    names, watch = order
    build_engine = start.build_engine

    def watched_engine(*arguments):
        engine = build_engine(*arguments)
        for name in ("sleep", "update"):
            watch(engine, name)
        return engine

    monkeypatch.setattr(start, "build_engine", watched_engine)
    watch(start, "initial_trainer")
    with run_copy.opened() as run:
        start.warm_start(run)
        start.build_workers(run)
        watch(run.trainer, "export")
        push(run, read_scales(run, carried(run, 1)["scales"]))
    assert names == ["sleep", "initial_trainer", "sleep", "export", "update"]
