"""A run on a Ray cluster of two nodes: it computes what one process does, and survives what it loses."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.cluster_utils import Cluster
from ray_nodes import add_nodes

from fp8core.cluster.worker_group import Call, Handle
from fp8core.cluster.workers import Cluster as RemoteCluster
from fp8core.cluster.workers import RemoteSft
from fp8core.config.load import load_config
from fp8core.config.model import WarmStartConfig
from fp8core.config.run import RunConfig
from fp8core.data.demonstrations import TokenisedDemonstration
from fp8core.errors import MemberLost, UserError
from fp8core.models.checkpoint import find_checkpoint, save_checkpoint
from fp8core.numerics.fingerprint import policy_digest
from fp8core.run.build import build_base, build_sft_trainer, open_cluster
from fp8core.run.context import RunContext
from fp8core.run.execute import StepError
from fp8core.run.loop import Execution, train
from fp8core.run.start import train_on_demonstrations
from fp8core.store.artifacts import ArtifactStore

TWO_EACH = {"engines": 2, "ranks": 2}


class Accidents(Execution):
    """Before the steps that are named, something happens."""

    def __init__(self, by_step: dict[int, Callable[[RunContext], None]]) -> None:
        self._by_step = by_step

    def before_step(self, run: RunContext, index: int) -> None:
        if (accident := self._by_step.pop(index, None)) is not None:
            accident(run)


def await_cpus(cluster: Cluster, count: int) -> None:
    """Nodes that were ended are listed until some heartbeats are missing."""
    ray.init(cluster.address)
    try:
        deadline = time.monotonic() + 120
        while ray.cluster_resources().get("CPU", 0) != count:
            assert time.monotonic() < deadline, f"the cluster has {ray.cluster_resources()}"
            time.sleep(0.1)
    finally:
        ray.shutdown()


def to_engine_1_while_step_2_generates(run: RunContext) -> None:
    """It ends once a part of the rollout is durable."""
    folder, victim = run.directory.path / "shards" / "00002", run.cluster.workers.engines[1].place.pid

    def watch() -> None:
        until = time.monotonic() + 300
        while not any(folder.glob("*.parquet")) and time.monotonic() < until:
            time.sleep(0.001)
        os.kill(victim, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def test_two_engines_and_two_ranks_on_two_nodes_make_the_records_of_one_process(two_nodes, loop_run):
    refill = {"rollout.refill.max_batches": 3}
    run = loop_run("two", **refill, cluster={"address": two_nodes.address, **TWO_EACH})
    assert run.records == loop_run("one", **refill).records
    places = run.store.get_json(run.ledger.steps()[4].manifest)["observed"]["cluster"]
    assert set(places) == {"engine 0", "engine 1", "rank 0", "rank 1"}
    assert len({place["pid"] for place in places.values()}) == 4


@pytest.mark.slow
def test_episodes_on_two_engines_and_two_ranks_are_those_of_one_process_though_an_engine_is_lost(
    two_nodes, loop_run, tmp_path
):
    """The environment answers after each turn, so an engine gets requests while others of it are in flight, and most of
    them beside an update."""
    place = Path(__file__).parents[2] / "parts" / "digits_environment.py"
    settings = {
        "environment": {"name": f"{place}:Digits", "max_turns": 12, "turn_tokens": 3},
        **{"rollout.max_new_tokens": 40, "rollout.group_size": 4, "steps": 3, "pipeline.mode": "one_step_off"},
    }
    whole = loop_run("talked", **settings)
    two = whole.copy(tmp_path)
    two.cut_after(1, "record")

    with two.opened(cluster={"address": two_nodes.address, **TWO_EACH}) as run:
        train(run, Accidents({2: to_engine_1_while_step_2_generates}))
    assert "engine 1 ended" in two.said
    assert two.records == whole.records
    assert min(two.metric("environment/turns").values()) > 2
    assert set(two.metric("alignment/tokens_differing").values()) == {0}
    assert set(two.metric("alignment/token_mult_prob_error").values()) == {1}


@pytest.mark.slow
def test_a_lost_engine_rank_or_node_is_replaced_and_the_run_ends_with_equal_records(two_nodes, run_copy, whole_run):
    run_copy.cut_after(1, "record")

    def rank_1(run: RunContext) -> None:
        os.kill(run.cluster.workers.ranks[1].place.pid, signal.SIGKILL)

    def between_steps_and_again_while_all_are_placed(run: RunContext) -> None:
        cluster = run.cluster

        def replace() -> None:
            del cluster.replace
            cluster.replace()
            rank_1(run)
            cluster.workers.call_all(cluster.workers.ranks, "build", "first", list, ())

        cluster.replace = replace
        rank_1(run)

    def of_a_node(_: RunContext) -> None:
        lost = next(iter(two_nodes.worker_nodes))
        add_nodes(two_nodes, {"num_cpus": 1})
        two_nodes.remove_node(lost, allow_graceful=False)

    cluster = {"address": two_nodes.address, **TWO_EACH, "replacements": 4}
    twice = between_steps_and_again_while_all_are_placed
    with run_copy.opened(**{f"cluster.{key}": value for key, value in cluster.items()}) as run:
        train(run, Accidents({2: to_engine_1_while_step_2_generates, 3: twice, 4: of_a_node}))
    assert run_copy.records == whole_run.records
    assert run_copy.said.count("all processes are replaced") == 4
    lost = re.findall(r"(\w+ \d) ended: .*all processes are replaced", run_copy.said)
    # Of a node's members, the one that is asked first is named.
    assert lost[:3] == ["engine 1", "rank 1", "rank 1"]
    await_cpus(two_nodes, 2)


@pytest.mark.slow
def test_ranks_that_share_passes_score_as_one_process_and_go_on_when_one_is_lost(two_nodes, loop_run, tmp_path):
    packed = {"training.packed": True, "precision.rounding_points": "kernels"}
    cluster = {"address": two_nodes.address, "ranks": 2}
    shared = loop_run("shared", **packed, **{"training.context_parallel": 2, "cluster": cluster})
    alone = loop_run("packed", **packed)
    for key, ideal in (("token_mult_prob_error", 1), ("tokens_differing", 0)):
        assert set(shared.metric(f"alignment/{key}").values()) == {ideal}
    losses, expected = (run.metric("train/loss") for run in (shared, alone))
    assert losses[1] == expected[1]
    assert losses == pytest.approx(expected, rel=1e-3)

    again = shared.copy(tmp_path)
    again.cut_after(1, "record")
    with again.opened() as run:
        train(run, Accidents({3: lambda run: os.kill(run.cluster.workers.ranks[1].place.pid, signal.SIGKILL)}))
    assert "rank 1 ended" in again.said
    assert again.records == shared.records


@pytest.mark.slow
def test_a_run_fails_when_processes_are_lost_more_often_than_allowed(two_nodes, run_copy):
    run_copy.cut_after(2, "record")
    settings = {"cluster.address": two_nodes.address, "cluster.engines": 2, "cluster.replacements": 0}

    def lose(run: RunContext) -> None:
        os.kill(run.cluster.workers.engines[0].place.pid, signal.SIGKILL)

    began = time.monotonic()
    with run_copy.opened(**settings) as run, pytest.raises(StepError, match="engine 0 ended") as caught:
        train(run, Accidents({3: lose}))
    assert isinstance(caught.value.__cause__, MemberLost)
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"cluster.address": "127.0.0.1:1"}, "cluster.address=127.0.0.1:1: nothing answers there"),
        ({"cluster.engines": 3, "cluster.placement": "separate"}, "4 CPUs are needed, the cluster has 2"),
    ],
)
def test_what_cannot_be_placed_is_refused_in_one_line(two_nodes, settings, said):
    config = load_config("tiny", {"cluster.address": two_nodes.address, "cluster.engines": 2, **settings})
    with pytest.raises(UserError, match=said) as refused:
        open_cluster(config)
    assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_two_ranks_train_a_warm_start_read_files_and_get_calls_in_one_order(two_nodes, tmp_path, monkeypatch):
    """Each part says what it holds. Processes cost seconds, so all parts have the same ones."""
    settings = {"cluster": {"address": two_nodes.address, "ranks": 2}}
    config, packed = load_config("tiny", settings), load_config("tiny", {**settings, "training.packed": True})
    with closing(open_cluster(packed)) as cluster:
        rank_0_trains_the_warm_start_to_the_bytes_of_this_process(cluster, packed, tmp_path)
        with monkeypatch.context() as moved:
            moved.chdir(tmp_path)
            weights_of_files_are_read_by_ranks_wherever_they_run(cluster, config, packed, tmp_path)
        with monkeypatch.context() as slow:
            ranks_get_the_calls_of_several_threads_in_one_order(cluster, slow)
    assert not ray.is_initialized()


def rank_0_trains_the_warm_start_to_the_bytes_of_this_process(
    cluster: RemoteCluster, config: RunConfig, folder: Path
) -> None:
    base, settings, store = build_base(config), WarmStartConfig(steps=3), ArtifactStore(folder / "shelf")

    def batch(step: int) -> list[TokenisedDemonstration]:
        return [TokenisedDemonstration([3, 4 + step, 5], list(range(6, 8 + row))) for row in range(4)]

    found = []
    for where in (None, cluster):
        with closing(build_sft_trainer(config, base.arch, base.tensors, where)) as trainer:
            assert isinstance(trainer, RemoteSft) == (where is cluster)
            train_on_demonstrations(trainer, settings, batch, lambda *_: None)
            found.append(trainer.store_weights(store))
            if where is None:
                store.path(found[0]).unlink()
    assert found[0] == found[1]
    trained = store.file_tensors(found[1])
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in trained.items()} == {
        name: (tensor.shape, torch.float32) for name, tensor in base.tensors.items()
    }
    assert policy_digest(trained) != policy_digest(base.tensors)


def weights_of_files_are_read_by_ranks_wherever_they_run(
    cluster: RemoteCluster, config: RunConfig, packed: RunConfig, folder: Path
) -> None:
    base = build_base(config)
    save_checkpoint(Path("model"), base.arch, base.tensors, base.tokenizer, dtype=torch.float32)
    read = find_checkpoint(Path("model")).source()
    store = ArtifactStore(folder / "unchanged")
    with closing(cluster.build_trainer(config, base.arch, read)) as trainer:
        assert trainer.digest() == trainer.start_digest == policy_digest(base.tensors)
    with closing(build_sft_trainer(packed, base.arch, read, cluster)) as sft:
        assert policy_digest(store.file_tensors(sft.store_weights(store))) == policy_digest(base.tensors)


def ranks_get_the_calls_of_several_threads_in_one_order(cluster: RemoteCluster, slow: pytest.MonkeyPatch) -> None:
    """As those of tasks that run side by side: in another order, collectives of one would meet those of another."""
    workers, send = cluster.workers, Handle.send

    def late(member: Handle, *arguments: Any) -> Call:
        time.sleep(0.02 if member is workers.ranks[1] else 0)
        return send(member, *arguments)

    workers.call_all(workers.ranks, "build", "calls", list, ())
    slow.setattr(Handle, "send", late)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: workers.call_all(workers.ranks, "call", "calls", "append", number), range(8)))
    first, second = workers.call_all(workers.ranks, "call", "calls", "copy")
    assert first == second
    assert sorted(first) == list(range(8))


@pytest.mark.slow
def test_a_node_with_other_code_is_refused(two_nodes, monkeypatch):
    monkeypatch.setattr("fp8core.cluster.worker_group.current_code", lambda: "0" * 64)
    config = load_config("tiny", {"cluster.address": two_nodes.address})
    with pytest.raises(UserError, match=r"has code \w+, this process has 000000000000"):
        open_cluster(config)
