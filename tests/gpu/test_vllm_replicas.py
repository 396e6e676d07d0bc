"""Engines on several GPUs of a Ray cluster: beside the trainer, and on a GPU of their own."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from aligned_policy import ARCH as SIX_LAYERS
from aligned_policy import sharp_weights
from stored_weights import stored

from fp8core.cluster.workers import Cluster, RankedTrainer, ReplicatedEngine
from fp8core.config.load import load_config
from fp8core.numerics.kv_scales import LayerScales
from fp8core.rollout.engine import Completion, PolicyScales, PromptGroup, Sampling
from fp8core.run.build import open_cluster
from fp8core.run.policy import check_formats, check_report

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("gpu"),
    pytest.mark.skipif(find_spec("vllm") is None or find_spec("ray") is None, reason="needs vLLM and Ray"),
    pytest.mark.skipif(GPUS < 2, reason="needs two GPUs"),
]
GIB = 1 << 30
ARCH = replace(SIX_LAYERS, num_layers=4)
SETTINGS: dict[str, Any] = {
    "rollout.max_batch": 64,
    "rollout.vllm.max_model_len": 1024,
    "rollout.vllm.kv_cache_gib": 4.0,
    "rollout.vllm.gpu_memory_utilization": 0.4,
    "rollout.vllm.graphs": False,
    "rollout.vllm.sleep": True,
}
COLOCATED = {"engines": 2, "ranks": 1, "placement": "colocated"}
SEPARATE = {"engines": 1, "ranks": 1, "placement": "separate"}


def scales_of(version: int) -> PolicyScales:
    return PolicyScales(version, tuple(LayerScales(2.0**-5, 2.0 ** -(5 + version), 0.0625) for _ in range(4)))


def groups_of(count: int) -> list[PromptGroup]:
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, ARCH.vocab_size, (20 + 7 * i,), generator=generator).tolist() for i in range(count)]
    return [
        PromptGroup(i, f"{i}", tuple(prompt), (0, 1, 2, 3), tuple(range(4 * i, 4 * i + 4)))
        for i, prompt in enumerate(prompts)
    ]


def collect(engine: ReplicatedEngine, groups: Sequence[PromptGroup]) -> list[Completion]:
    found = [done for finished in engine.generate(groups, Sampling(1.0, 48, frozenset())) for done in finished]
    return sorted(found, key=lambda done: (done.group, done.sample))


def free() -> list[int]:
    """Bytes on each of the two GPUs."""
    return [torch.cuda.mem_get_info(gpu)[0] for gpu in range(2)]


@contextmanager
def placed(**settings: Any) -> Iterator[tuple[Cluster, ReplicatedEngine, RankedTrainer]]:
    config = load_config("h200-small", SETTINGS | {"cluster": settings})
    masters = sharp_weights(ARCH)
    cluster = open_cluster(config)
    assert cluster is not None
    try:
        with TemporaryDirectory() as folder:
            start = stored(Path(folder) / "start", masters)
            trainer = cluster.build_trainer(config, ARCH, start)
        yield cluster, cluster.build_engine(config, ARCH), trainer
    finally:
        cluster.close()


def sync(engine: ReplicatedEngine, trainer: RankedTrainer, version: int) -> float:
    """Seconds that an update took, which is proved to have arrived."""
    shipped, began = trainer.export(), time.perf_counter()
    report = engine.update(shipped, scales_of(version), version)
    seconds = time.perf_counter() - began
    check_report(report, shipped.digest(), scales_of(version), version)
    assert engine.fingerprint() == shipped.digest()
    return seconds


def test_engines_beside_the_trainer_and_apart_from_it_write_the_same_tokens(capsys) -> None:
    """One GPU's memory, another GPU's memory, and NCCL; two engines and one."""
    written = []
    for settings in (COLOCATED, SEPARATE):
        with placed(**settings) as (_, engine, trainer):
            seconds = [sync(engine, trainer, version) for version in (0, 1, 2, 1)]
            check_formats(engine.describe(), load_config("h200-small").precision)
            written.append(collect(engine, groups_of(7)))
        with capsys.disabled():
            print(f"\n{settings['placement']}: syncs of {', '.join(f'{each:.3f}' for each in seconds)} s")
    assert [(done.group, done.sample) for done in written[0]] == [(i, j) for i in range(7) for j in range(4)]
    assert written[0] == written[1]


def test_gpus_get_their_memory_back_and_updates_leave_nothing_behind() -> None:
    with placed(**COLOCATED) as (_, engine, trainer):
        for version in (0, 1):
            sync(engine, trainer, version)
            found = collect(engine, groups_of(4))
        awake = free()
        engine.sleep()
        gained = [(rest - work) / GIB for rest, work in zip(free(), awake, strict=True)]
        assert min(gained) > 3.5, f"of 4 GiB of cache each: {gained}"
        for _ in range(3):
            sync(engine, trainer, 1)
            assert collect(engine, groups_of(4)) == found
        lost = [(before - now) / GIB for before, now in zip(awake, free(), strict=True)]
        assert max(lost) < 0.1, lost
