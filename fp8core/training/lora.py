"""LoRA: a policy of frozen weights and of adapters of its linears, which alone learn.

The policy is the merged weights (`numerics.lora`). Frozen weights are in BF16: on the grid of block FP8 a product below
half a step would round back. `weights_digest` covers the merged weights in BF16 and the FP32 adapters."""

import hashlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from fp8core.config.training import LoraConfig
from fp8core.models.architecture import Architecture
from fp8core.models.families import parameter_shapes
from fp8core.models.weights import is_linear
from fp8core.numerics.fingerprint import policy_digest
from fp8core.numerics.lora import merged_weight, with_gradients

LEFT_SUFFIX = ".lora_B.weight"
RIGHT = ".lora_A.weight"
_WEIGHT = ".weight"
Shapes = Mapping[str, tuple[int, ...]]


def is_target(name: str, lora: LoraConfig) -> bool:
    return is_linear(name) and name.split(".")[-2] in lora.targets


def learning_linears(shapes: Shapes, lora: LoraConfig | None) -> dict[str, tuple[int, ...]]:
    linears = {name: shape for name, shape in shapes.items() if is_linear(name)}
    return linears if lora is None else {name: shape for name, shape in linears.items() if is_target(name, lora)}


def adapter_shapes(shapes: Shapes, lora: LoraConfig) -> dict[str, tuple[int, ...]]:
    """Every adapter's A, [rank, in], and B, [out, rank], by name."""
    adapters: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        if is_target(name, lora):
            module = name.removesuffix(_WEIGHT)
            adapters[module + RIGHT], adapters[module + LEFT_SUFFIX] = (lora.rank, shape[1]), (shape[0], lora.rank)
    return adapters


def adapter_refusals(arch: Architecture, lora: LoraConfig | None) -> Iterator[str]:
    if lora is None:
        return
    if arch.sparse_layers:
        yield "training.lora: the model has experts, which have no adapters; set training.lora to null"
        return
    targets = {name: shape for name, shape in parameter_shapes(arch).items() if is_target(name, lora)}
    name, shape = min(targets.items(), key=lambda target: min(target[1]))
    if lora.rank > min(shape):
        yield f"training.lora.rank={lora.rank}: {name} is {list(shape)}; lower it to {min(shape)}"


def frozen_line(arch: Architecture, lora: LoraConfig) -> str:
    shapes = parameter_shapes(arch)
    adapters = len(adapter_shapes(shapes, lora)) // 2
    return f"training.lora: {adapters} adapters learn; all {len(shapes)} weights are frozen, in BF16"


class Adapters:
    """A and B of every target. `trainable`: FP32, by the names of `adapter_shapes`. `factor`: alpha / rank."""

    def __init__(self, shapes: Shapes, lora: LoraConfig, seed: int, device: torch.device) -> None:
        """A is drawn as PEFT draws it (uniform within 1 / sqrt(in)), each from the seed and its name; B is 0."""
        self._lora = lora
        self.factor = lora.alpha / lora.rank
        self.trainable = {
            name: torch.zeros(shape, device=device) for name, shape in adapter_shapes(shapes, lora).items()
        }
        for name, tensor in self.trainable.items():
            if name.endswith(RIGHT):
                digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
                numbers = torch.rand(tensor.shape, generator=generator, dtype=torch.float64)
                tensor.copy_((2 * numbers - 1) / tensor.shape[1] ** 0.5)

    def of(self, name: str) -> tuple[Tensor, Tensor] | None:
        """B and A of a parameter; None where it has no adapter."""
        module = name.removesuffix(_WEIGHT)
        matrix = self.trainable.get(module + LEFT_SUFFIX)
        return None if matrix is None else (matrix, self.trainable[module + RIGHT])

    @torch.no_grad()
    def policy_weight(self, name: str, frozen: Tensor, rows: slice) -> Tensor:
        """Rows of a policy's weight, FP32, from the same rows of the frozen one."""
        pair = self.of(name)
        return frozen.float() if pair is None else merged_weight(frozen, pair[0][rows], pair[1], self.factor)

    def describe(self, frozen: Mapping[str, Tensor]) -> dict[str, object]:
        return {"lora": {**self._lora.model_dump(mode="json"), "frozen": {"bf16": len(frozen)}}}


class FullWeights:
    """`trainable`: FP32 tensors that receive gradients. `base`: digest of what is frozen; None where nothing is."""

    base: str | None = None

    def __init__(self, masters: Mapping[str, Tensor]) -> None:
        self.trainable = {name: tensor.float().clone().requires_grad_(True) for name, tensor in masters.items()}

    def weights(self) -> dict[str, Tensor]:
        return self.trainable

    def changed(self) -> None: ...

    def digest(self) -> str:
        return policy_digest({name: tensor.detach() for name, tensor in self.trainable.items()})

    def describe(self) -> dict[str, object]:
        return {}


class AdaptedWeights:
    """Merged weights are kept until the adapters change: on a CPU memory is not what adapters save."""

    def __init__(self, masters: Mapping[str, Tensor], lora: LoraConfig, seed: int) -> None:
        self._frozen = {name: tensor.detach().bfloat16() for name, tensor in masters.items()}
        shapes = {name: tuple(tensor.shape) for name, tensor in self._frozen.items()}
        self._adapters = Adapters(shapes, lora, seed, torch.device("cpu"))
        self.trainable = {name: tensor.requires_grad_(True) for name, tensor in self._adapters.trainable.items()}
        self.base: str | None = policy_digest(self._frozen)
        self._policy_weights: dict[str, Tensor] = {}

    def weights(self) -> dict[str, Tensor]:
        return {name: self._with_gradients(name, weight) for name, weight in self._whole().items()}

    def changed(self) -> None:
        self._policy_weights = {}

    def digest(self) -> str:
        bf16_weights = {name: weight.bfloat16() for name, weight in self._whole().items()}
        return policy_digest(bf16_weights | {name: tensor.detach() for name, tensor in self.trainable.items()})

    def describe(self) -> dict[str, object]:
        return self._adapters.describe(self._frozen)

    def _whole(self) -> dict[str, Tensor]:
        if not self._policy_weights:
            self._policy_weights = {
                name: self._adapters.policy_weight(name, frozen, slice(None)) for name, frozen in self._frozen.items()
            }
        return self._policy_weights

    def _with_gradients(self, name: str, weight: Tensor) -> Tensor:
        pair = self._adapters.of(name)
        return weight if pair is None else with_gradients(weight, *pair, self._adapters.factor)


LearntWeights = FullWeights | AdaptedWeights
