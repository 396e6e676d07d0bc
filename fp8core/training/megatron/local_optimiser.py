"""AdamW over FP32 parameters in this process: what a CPU trains with, where Megatron's optimiser needs a GPU."""

from pathlib import Path

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from torch import Tensor
from torch.distributed import all_reduce

from fp8core.config.run import TrainingConfig
from fp8core.training.megatron.checkpoint import load_state, save_state
from fp8core.training.megatron.groups import data_group, tensor_group
from fp8core.training.megatron.model import PolicyModel

_QK_NORMS = ("q_layernorm.weight", "k_layernorm.weight")
_MOMENTS = ("exp_avg", "exp_avg_sq")


class LocalOptimiser:
    """Parameters are masters. Gradients are summed over data-parallel processes, clipped by their global norm."""

    def __init__(self, model: PolicyModel, training: TrainingConfig) -> None:
        self._named: dict[str, Tensor] = dict(model.named_parameters())
        self._adam = torch.optim.AdamW(
            self._named.values(),
            lr=training.learning_rate,
            betas=(training.beta1, training.beta2),
            weight_decay=training.weight_decay,
        )
        self._limit = training.max_grad_norm

    def clear(self) -> None:
        """Forget all gradients."""
        self._adam.zero_grad(set_to_none=True)

    def finish(self) -> float:
        """Complete the gradients over all processes and return their global norm."""
        for name, parameter in self._named.items():
            # An expert that no token chose has no gradient.
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if name.endswith(_QK_NORMS):
                # Each process saw its own heads.
                all_reduce(parameter.grad, group=tensor_group())
            all_reduce(parameter.grad, group=data_group())
        whole = torch.zeros((), dtype=torch.float64)
        shared = torch.zeros((), dtype=torch.float64)
        for parameter in self._named.values():
            assert parameter.grad is not None
            into = shared if getattr(parameter, "tensor_model_parallel", False) else whole
            into += parameter.grad.double().square().sum()
        all_reduce(shared, group=tensor_group())
        return float((whole + shared).sqrt())

    def step(self, norm: float, learning_rate: float) -> None:
        """Clip by the norm that `finish` returned and update."""
        factor = min(1.0, self._limit / (norm + 1e-6))
        for parameter in self._named.values():
            assert parameter.grad is not None
            parameter.grad *= factor
        self._adam.param_groups[0]["lr"] = learning_rate
        self._adam.step()

    def gradients(self) -> dict[str, Tensor]:
        """Of this process, by Megatron's names, after `finish`."""
        return {name: parameter.grad for name, parameter in self._named.items() if parameter.grad is not None}

    def masters(self) -> dict[str, Tensor]:
        """FP32 weights of this process by Megatron's names."""
        return {name: parameter.detach() for name, parameter in self._named.items()}

    def save(self, folder: Path, model: ShardedStateDict) -> None:
        """Write masters and moments."""
        save_state(folder, self._sharded(model))

    def load(self, folder: Path, model: ShardedStateDict, updates: int) -> None:
        """Take what `save` wrote after so many updates."""
        state = load_state(folder, self._sharded(model))
        for name, parameter in self._named.items():
            parameter.data.copy_(state[f"master/{name}"])
            moments = {key: state[f"{key}/{name}"] for key in _MOMENTS}
            self._adam.state[parameter] = {**moments, "step": torch.tensor(float(updates))}

    def _sharded(self, model: ShardedStateDict) -> ShardedStateDict:
        return {
            f"{key}/{name}": make_sharded_optimizer_tensor(model[name], tensor, prefix=f"optimizer.{key}")
            for name, parameter in self._named.items()
            for key, tensor in self._state(parameter).items()
        }

    def _state(self, parameter: Tensor) -> dict[str, Tensor]:
        # Before the first update there are no moments: they are zero.
        found = self._adam.state.get(parameter) or {key: torch.zeros_like(parameter) for key in _MOMENTS}
        return {"master": parameter.detach(), **{key: found[key] for key in _MOMENTS}}
