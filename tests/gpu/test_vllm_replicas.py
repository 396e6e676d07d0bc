"""Engines on several GPUs: each holds what a trainer on the first GPU sent, all generate, and all sleep and wake."""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec

import psutil
import pytest
import torch
from torch import Tensor

from flows.environment import set_variables
from fp8core.config.capability import this_platform
from fp8core.config.precision import PrecisionContract
from fp8core.config.section import VllmConfig
from fp8core.models.architecture import Architecture
from fp8core.models.checkpoint import initial_weights
from fp8core.models.weights import rollout_formats, stored_weights
from fp8core.numerics.fingerprint import policy_digest
from fp8core.numerics.kv_scales import LayerScales
from fp8core.rollout.engine import Completion, PolicyScales, PromptGroup, Sampling
from fp8core.rollout.vllm.process import EngineProcessError, VllmReplicas
from fp8core.rollout.vllm.requirements import find_build
from fp8core.rollout.vllm.settings import required_environment, suggested_environment
from fp8core.run.policy import check_formats, check_report

ENGINES = min(torch.cuda.device_count(), 8)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("gpu"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM"),
    pytest.mark.skipif(ENGINES < 2, reason="needs two GPUs"),
]
GIB = 1 << 30
CONTRACT = PrecisionContract(rounding_points="kernels")
OPTIONS = VllmConfig(
    gpus=max(ENGINES, 1), sleep=True, graphs=False, max_model_len=1024, kv_cache_gib=4.0, gpu_memory_utilization=0.4
)
ARCH = Architecture(
    family="qwen3",
    vocab_size=2048,
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=4,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    max_positions=2048,
    rope_scaling=None,
    qk_norm=True,
    tie_embeddings=False,
)


def scales_of(version: int) -> PolicyScales:
    return PolicyScales(version, tuple(LayerScales(2.0**-5, 2.0 ** -(5 + version), 0.0625) for _ in range(4)))


def policy(version: int) -> dict[str, Tensor]:
    """What is shipped, on the first GPU."""
    weights = {name: w * 2 if w.dim() == 2 else w for name, w in initial_weights(ARCH, seed=version).items()}
    stored = stored_weights(weights, rollout_formats(CONTRACT, ARCH.num_layers).stored_names(), "pow2")
    return {name: tensor.to("cuda:0") for name, tensor in stored.items()}


def groups_of(count: int) -> list[PromptGroup]:
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, ARCH.vocab_size, (20 + 7 * i,), generator=generator).tolist() for i in range(count)]
    return [
        PromptGroup(i, f"{i}", tuple(prompt), (0, 1, 2, 3), tuple(range(4 * i, 4 * i + 4)))
        for i, prompt in enumerate(prompts)
    ]


def collect(engines: VllmReplicas, groups: Sequence[PromptGroup]) -> list[Completion]:
    found = [done for finished in engines.generate(groups, Sampling(1.0, 48, frozenset())) for done in finished]
    return sorted(found, key=lambda done: (done.group, done.sample))


def free() -> list[int]:
    """Bytes on each GPU."""
    return [torch.cuda.mem_get_info(gpu)[0] for gpu in range(ENGINES)]


@pytest.fixture(scope="module")
def pair() -> Iterator[VllmReplicas]:
    build = find_build(this_platform())
    set_variables(required_environment(CONTRACT, OPTIONS, build), suggested_environment(1, build))
    found = VllmReplicas(ARCH, CONTRACT, OPTIONS, 64, build)
    yield found
    found.close()


@pytest.fixture
def engines(pair: VllmReplicas) -> VllmReplicas:
    """They hold policy 0."""
    pair.update(policy(0), scales_of(0), 0)
    return pair


def test_what_lies_on_the_first_gpu_reaches_every_engine(engines: VllmReplicas) -> None:
    for version in (1, 2, 1):
        tensors = policy(version)
        report = engines.update(tensors, scales_of(version), version)
        check_report(report, policy_digest(tensors), scales_of(version), version)
        assert engines.fingerprint() == policy_digest(tensors)
    described = engines.describe()
    check_formats(described, CONTRACT)
    assert described["engines"] == ENGINES


def test_what_lies_in_main_memory_reaches_every_engine(engines: VllmReplicas) -> None:
    tensors = policy(1)
    report = engines.update({name: tensor.cpu() for name, tensor in tensors.items()}, scales_of(1), 1)
    check_report(report, policy_digest(tensors), scales_of(1), 1)


def test_updates_leave_nothing_behind(engines: VllmReplicas) -> None:
    tensors = policy(1)
    before = torch.cuda.memory_allocated(0), [engines.call_worker(i, "policy_memory") for i in range(ENGINES)]
    for _ in range(5):
        engines.update(tensors, scales_of(1), 1)
    after = torch.cuda.memory_allocated(0), [engines.call_worker(i, "policy_memory") for i in range(ENGINES)]
    assert after[0] == before[0]
    for ours, theirs in zip(after[1], before[1], strict=True):
        assert ours["allocated"] == theirs["allocated"]


def test_every_group_is_completed(engines: VllmReplicas) -> None:
    groups = groups_of(3 * ENGINES + 1)
    found = collect(engines, groups)
    assert [(done.group, done.sample) for done in found] == [(g.group, i) for g in groups for i in range(4)]
    assert all(len(done.tokens) == 48 for done in found)
    assert len({tuple(done.tokens) for done in found}) == len(found), "other seeds and prompts draw other tokens"
    assert len(collect(engines, groups[:1])) == 4, "the others have nothing to do"


def test_every_gpu_gets_its_memory_back_while_engines_rest(engines: VllmReplicas) -> None:
    groups = groups_of(2 * ENGINES)
    awake, found = free(), collect(engines, groups)
    engines.sleep()
    asleep = free()
    gained = [(rest - work) / GIB for rest, work in zip(asleep, awake, strict=True)]
    assert min(gained) > 3.5, f"of 4 GiB of cache each: {gained}"
    tensors = policy(0)
    report = engines.update(tensors, scales_of(0), 0)
    check_report(report, policy_digest(tensors), scales_of(0), 0)
    assert min((rest - work) / GIB for rest, work in zip(asleep, free(), strict=True)) > 3.5
    assert len(collect(engines, groups)) == len(found)


def test_generation_can_be_abandoned(engines: VllmReplicas) -> None:
    running = engines.generate(groups_of(8 * ENGINES), Sampling(1.0, 512, frozenset()))
    next(running)
    running.close()
    engines.update(policy(1), scales_of(1), 1)
    assert len(collect(engines, groups_of(ENGINES))) == 4 * ENGINES


def test_an_engine_that_is_killed_is_named_and_gives_its_gpu_back(engines: VllmReplicas) -> None:
    """The last that the fixture's engines see."""
    started = [child for child in psutil.Process().children() if "vllm.process" in " ".join(child.cmdline())]
    below = started[-1].children(recursive=True)
    before = free()[-1]
    started[-1].kill()
    with pytest.raises(EngineProcessError, match=f"^vLLM on GPU {ENGINES - 1} ended with exit code -9$"):
        collect(engines, groups_of(ENGINES))
    _, alive = psutil.wait_procs(below, timeout=10)
    assert not alive
    assert free()[-1] - before > 3.5 * GIB
