"""One vLLM for all tests here, and the policies it is given: BF16 on a CPU, block FP8 with an FP8 cache on Hopper.

On a CPU these tests need an environment of their own (`make test-vllm`); where no vLLM is installed they are not
collected.
"""

import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from fp8core.config.capability import this_platform
from fp8core.config.engines import VllmConfig
from fp8core.config.loss import LossConfig
from fp8core.config.precision import PrecisionContract, SidePrecision, TrainingPrecision
from fp8core.config.training import CorrectionConfig, TrainingConfig
from fp8core.models.architecture import Architecture
from fp8core.models.checkpoint import initial_weights
from fp8core.models.weights import rollout_formats, training_formats
from fp8core.numerics.kv_scales import LayerScales
from fp8core.processes.variables import set_variables
from fp8core.rl.batch import TokenBatch
from fp8core.rl.objective import Objective
from fp8core.rollout.engine import Completion, PolicyScales, PromptGroup, SyncReport
from fp8core.rollout.shared_weights import share_weights, specs_of
from fp8core.rollout.vllm.entry import find_build
from fp8core.rollout.vllm.settings import required_environment, suggested_environment
from fp8core.training.exact import ExactTrainer

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]
# vLLM's processes import the faulty worker by its name.
sys.path.insert(0, str(Path(__file__).parent))

ON_GPU = this_platform() != "cpu"
# The reference rounds where vLLM does: in compiled code on a GPU, in torch's own operations on a CPU.
FP8 = PrecisionContract(rounding_points="fused", attention="fp8")
BF16 = PrecisionContract(
    rollout=SidePrecision(linear="bf16", kv_cache="bf16"),
    training=TrainingPrecision(linear="bf16", kv_cache="bf16"),
    rounding_points="native",
)
CONTRACT = FP8 if ON_GPU else BF16
OPTIONS = VllmConfig(graphs=ON_GPU, kv_cache_gib=0.125, gpu_memory_utilization=0.2)
# Settings of two such engines on a cluster.
REPLICAS: dict[str, Any] = {
    "cluster.engines": 2,
    "rollout.max_batch": 16,
    "rollout.vllm": OPTIONS.model_dump(),
    "precision": CONTRACT.model_dump(),
    "threads": 1,
}
# A vocabulary that vLLM pads, fewer KV than query heads, heads * head_dim other than hidden_size; true tiles on a GPU.
SHAPE: dict[str, Any] = {
    "family": "qwen3",
    "vocab_size": 200,
    "hidden_size": 256 if ON_GPU else 128,
    "intermediate_size": 384 if ON_GPU else 192,
    "num_layers": 2,
    "num_heads": 4 if ON_GPU else 6,
    "num_kv_heads": 2,
    "head_dim": 128 if ON_GPU else 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "max_positions": 256,
    "rope_scaling": None,
    "tie_embeddings": False,
}
# vLLM's kernels for CPUs truncate to BF16 where an x86 processor cannot round to it (csrc/cpu/cpu_types_x86.hpp,
# without AVX512_BF16): those of rotary positions and attention. The reference rounds.
TRUNCATES = not ON_GPU and platform.machine() == "x86_64" and not torch.cpu._is_avx512_bf16_supported()
# Where a processor has tiles (AMX), vLLM's attention is another kernel, which rounds probabilities as `stepwise` does:
# 0.010 to 0.023 nats from the reference in the mean, and below 0.01 with the kernel of other processors.
HAS_TILES = not ON_GPU and torch.cpu._is_amx_tile_supported()
ROUNDS_OTHERWISE = TRUNCATES or HAS_TILES
# BF16 against the forward that trains, which sums in another order. The bounds are several times the largest distance
# measured on a CPU, and far below that of another temperature or policy.
_BF16_MEAN, _BF16_LARGEST = (0.06, 0.3) if ROUNDS_OTHERWISE else (0.01, 0.15)


@dataclass(frozen=True)
class Bounds:
    """Bounds on the distance of vLLM's log-probs from the reference on the same tokens, in nats.

    In BF16 a number. In FP8 no number holds for every policy and temperature. A last bit of BF16 that differs becomes
    another code of three bits. Each layer passes it on, in exact arithmetic as much as on a GPU. So FP8 must come
    nearer to the reference's FP8 than the reference's own BF16 does, on these very tokens. An engine that computes
    another format, or another policy, does not. That distance is the bound of the mean; of the largest, which one token
    decides, it is twice the largest distance.
    """

    mean: float
    largest: float


@dataclass(frozen=True)
class Policy:
    """A trainer that holds a policy, and the scales that go with it."""

    trainer: ExactTrainer
    version: int
    in_bf16: ExactTrainer

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors to ship; on a GPU from its memory."""
        return {name: tensor.cuda() if ON_GPU else tensor for name, tensor in self.trainer.export().items()}

    @property
    def scales(self) -> PolicyScales:
        """Powers of two that cover Q, K and V; other ones for every policy, layer and tensor."""
        layers = range(self.trainer.arch.num_layers)
        return PolicyScales(self.version, tuple(LayerScales(2.0**-i, 2.0**-self.version, 0.5) for i in layers))

    def logprobs(self, groups: Sequence[PromptGroup], found: Sequence[Completion], temperature: float) -> list[Tensor]:
        """FP32 log-prob of every token of every completion."""
        return self._scored(self.trainer, groups, found, temperature)

    def bounds(self, groups: Sequence[PromptGroup], found: Sequence[Completion], temperature: float) -> Bounds:
        """The bounds for an engine in the format of the contract on these completions."""
        if not ON_GPU:
            return Bounds(_BF16_MEAN, _BF16_LARGEST)
        plain = torch.cat(self._scored(self.in_bf16, groups, found, temperature))
        apart = (plain - torch.cat(self.logprobs(groups, found, temperature))).abs()
        return Bounds(apart.mean().item(), 2 * apart.max().item())

    def _scored(
        self, trainer: ExactTrainer, groups: Sequence[PromptGroup], found: Sequence[Completion], temperature: float
    ) -> list[Tensor]:
        prompts = {group.group: list(group.prompt) for group in groups}
        tokens = [completion.tokens for completion in found]
        batch = TokenBatch.of([prompts[completion.group] for completion in found], tokens)
        scored = trainer.logprobs(batch, temperature, self.scales.layers).logprobs
        return [row[: len(completion)] for row, completion in zip(scored, tokens, strict=True)]


def build_policy(arch: Architecture, version: int, contract: PrecisionContract = CONTRACT) -> Policy:
    """Random weights, sharp enough to have favourites, and norms that are not all 1; every version has its own."""
    generator = torch.Generator().manual_seed(version)
    weights = {
        name: w * 2 if w.dim() == 2 else w + 0.1 * torch.randn(w.shape, generator=generator)
        for name, w in initial_weights(arch, seed=version).items()
    }
    return Policy(_trainer(arch, weights, contract), version, _trainer(arch, weights, in_bf16(contract)))


def in_bf16(contract: PrecisionContract) -> PrecisionContract:
    parts = {"linear": "bf16", "kv_cache": "bf16"}
    sides = {"rollout": contract.rollout, "training": contract.training}
    return contract.model_copy(update={name: side.model_copy(update=parts) for name, side in sides.items()})


def _trainer(arch: Architecture, weights: dict[str, Tensor], contract: PrecisionContract) -> ExactTrainer:
    formats = training_formats(contract, arch.num_layers), rollout_formats(contract, arch.num_layers)
    return ExactTrainer(arch, weights, *formats, TrainingConfig(), Objective(LossConfig(), CorrectionConfig()))


def update_in_parts(engine: Any, policy: Policy, parts: int) -> SyncReport:
    """An update of which the engine never sees more than a part."""
    sent = list(policy.tensors.items())
    engine.expect(specs_of(dict(sent)), policy.scales, policy.version)
    for i in range(parts):
        with share_weights(dict(sent[i::parts])) as shared:
            engine.write(shared)
    report: SyncReport = engine.finish(policy.scales, policy.version)
    return report


def check_parameters_stay_where_they_are(engine: Any, policy: Policy) -> None:
    before = engine.ask_policy("addresses")
    engine.update(policy.tensors, policy.scales, policy.version)
    assert engine.ask_policy("addresses") == before


def wait_until_gone(processes: Sequence[psutil.Process]) -> None:
    """Fails where one is still there after ten seconds."""
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive, [process.cmdline() for process in alive]


@pytest.fixture(scope="session")
def vllm_build() -> Any:
    """The vLLM that is installed, with its environment prepared."""
    build = find_build(this_platform())
    set_variables(required_environment(CONTRACT, OPTIONS, build), suggested_environment(1, build))
    return build


@pytest.fixture(scope="session")
def started(vllm_build: Any) -> Iterator[Any]:
    from fp8core.rollout.vllm.engine import VllmEngine

    engine = VllmEngine(Architecture(**SHAPE), CONTRACT, OPTIONS, 16, vllm_build, "faulty_worker.FaultyWorker")
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def policies() -> tuple[Policy, Policy]:
    arch = Architecture(**SHAPE)
    return build_policy(arch, 0), build_policy(arch, 1)


@pytest.fixture
def engine(started: Any, policies: tuple[Policy, Policy]) -> Any:
    started.update(policies[0].tensors, policies[0].scales, 0)
    return started
