"""Optimisers of one process, Megatron's own and one for a CPU, and checkpoints in Megatron's format.

An optimiser owns the FP32 masters of this process and its gradients, by Megatron's names. `finish` completes gradients
over all processes and returns their global norm; `step` clips by that norm and updates; `clear` drops the gradients."""

import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict, is_main_replica
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner, mcore_to_pyt_state_dict
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from torch import Tensor
from torch.distributed import all_reduce
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from fp8core.config.training import TrainingConfig
from fp8core.numerics.adamw import MOMENT_NAMES
from fp8core.training.megatron.model import PolicyModel
from fp8core.training.megatron.parallel import data_group, tensor_group

_QK_NORMS = ("q_layernorm.weight", "k_layernorm.weight")


class LocalOptimiser:
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
        self._adam.zero_grad(set_to_none=True)

    def finish(self) -> float:
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
        factor = min(1.0, self._limit / (norm + 1e-6))
        for parameter in self._named.values():
            assert parameter.grad is not None
            parameter.grad *= factor
        self._adam.param_groups[0]["lr"] = learning_rate
        self._adam.step()

    def masters(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self._named.items()}

    def updated(self) -> dict[str, Tensor]:
        """The part of each master that this process updates, flat."""
        return {name: master.reshape(-1) for name, master in self.masters().items()}

    def is_expert(self, name: str) -> bool:
        """True if a parameter is one expert's, which fewer processes share."""
        return not getattr(self._named[name], "allreduce", True)

    def save(self, folder: Path, model: ShardedStateDict) -> None:
        save_state(folder, self._sharded(model))

    def load(self, folder: Path, model: ShardedStateDict, updates: int) -> None:
        state = load_state(folder, self._sharded(model))
        for name, parameter in self._named.items():
            parameter.data.copy_(state[f"master/{name}"])
            moments = {key: state[f"{key}/{name}"] for key in MOMENT_NAMES}
            self._adam.state[parameter] = {**moments, "step": torch.tensor(float(updates))}

    def _sharded(self, model: ShardedStateDict) -> ShardedStateDict:
        return {
            f"{key}/{name}": make_sharded_optimizer_tensor(model[name], tensor, prefix=f"optimizer.{key}")
            for name, parameter in self._named.items()
            for key, tensor in self._state(parameter).items()
        }

    def _state(self, parameter: Tensor) -> dict[str, Tensor]:
        # Before the first update there are no moments: they are zero.
        found = self._adam.state.get(parameter) or {key: torch.zeros_like(parameter) for key in MOMENT_NAMES}
        return {"master": parameter.detach(), **{key: found[key] for key in MOMENT_NAMES}}


# Every parameter on its own: a grid of another shape can read it.
_SHARDING = {"distrib_optim_sharding_type": "fully_reshardable"}


class MegatronOptimiser:
    def __init__(self, model: PolicyModel, training: TrainingConfig) -> None:
        shared = training.megatron.distributed_optimizer
        buffers = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=shared, average_in_collective=False
        )
        self._model = DistributedDataParallel(model.config, buffers, model)
        config = OptimizerConfig(
            optimizer="adam",
            lr=training.learning_rate,
            weight_decay=training.weight_decay,
            adam_beta1=training.beta1,
            adam_beta2=training.beta2,
            clip_grad=training.max_grad_norm,
            bf16=model.config.bf16,
            params_dtype=model.config.params_dtype,
            use_distributed_optimizer=shared,
        )
        # Without overrides Megatron would spare norms the weight decay.
        self._adam = get_megatron_optimizer(config, [self._model], config_overrides={})
        self._named: dict[str, Tensor] = dict(model.named_parameters())
        # Moments exist from the start, so that a policy that never learned can be saved as well.
        for part in self._adam.chained_optimizers:
            part.init_state_fn(part.optimizer, config)
        self.clear()

    def clear(self) -> None:
        self._model.zero_grad_buffer()
        self._adam.zero_grad()

    def finish(self) -> float:
        finalize_model_grads([self._model])
        self._adam.prepare_grads()
        return float(self._adam.get_grad_norm())

    def step(self, norm: float, learning_rate: float) -> None:
        for group in self._adam.param_groups:
            group["lr"] = learning_rate
        updated, again, _ = self._adam.step()
        assert updated, "Megatron did not update"
        assert float(again) == norm, f"Megatron saw a gradient norm of {again} instead of {norm}"

    def masters(self) -> dict[str, Tensor]:
        """FP32 masters by Megatron's names: of a parameter in BF16 the part that this process updates."""
        return {name: self._master(parameter) for name, parameter in self._named.items()}

    def updated(self) -> dict[str, Tensor]:
        """The part of each master that this process updates, flat; empty where others update all of it."""
        found = {name: master.reshape(-1) for name, master in self.masters().items()}
        return {name: part if part.dtype == torch.float32 else part[:0].float() for name, part in found.items()}

    def is_expert(self, name: str) -> bool:
        return not getattr(self._named[name], "allreduce", True)

    def _master(self, parameter: Tensor) -> Tensor:
        main: Tensor | None = getattr(parameter, "main_param", None)
        return parameter.detach() if main is None else main.detach()

    def save(self, folder: Path, model: ShardedStateDict) -> None:
        save_state(folder, self._state(model, loading=False))

    def load(self, folder: Path, model: ShardedStateDict, updates: int) -> None:
        loaded = load_state(folder, self._state(model, loading=True))
        for name, parameter in self._named.items():
            parameter.data.copy_(loaded["model"][name])
        self._adam.load_state_dict(loaded["optimizer"])

    def _state(self, model: ShardedStateDict, loading: bool) -> dict[str, Any]:
        optimizer = self._adam.sharded_state_dict(model, is_loading=loading, metadata=_SHARDING)
        return {"model": model, "optimizer": optimizer}


_THREADS = 2


def save_state(folder: Path, state: dict[str, Any]) -> None:
    """Write the parts of all processes; what several hold is written by one of them."""
    folder.mkdir(exist_ok=True)
    dist_checkpointing.save(state, str(folder), sharded_strategy=ThreadedWriter())


def load_state(folder: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    with warnings.catch_warnings():
        # Megatron calls torch's loader by its old name.
        warnings.filterwarnings("ignore", "`load_state_dict` is deprecated", FutureWarning)
        loaded: dict[str, Any] = dist_checkpointing.load(wanted, str(folder))
    return loaded


class ThreadedWriter(SaveShardedStrategy):
    """Megatron's own writer forks a process for each file; one outlives a training that is killed."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str) -> None:
        parts = defaultdict(list)
        for part in nested_values(sharded_state_dict):
            if is_main_replica(part.replica_id):
                parts[part.unique_key if isinstance(part, ShardedObject) else part.key].append(part)
        writer = FileSystemWriter(checkpoint_dir, thread_count=_THREADS)
        planner = MCoreSavePlanner(flatten_state_dict=False)
        save(mcore_to_pyt_state_dict(parts), storage_writer=writer, planner=planner)


Optimiser = LocalOptimiser | MegatronOptimiser
OptimiserFactory = Callable[[PolicyModel, TrainingConfig], Optimiser]


def optimiser_for(device: torch.device) -> OptimiserFactory:
    return MegatronOptimiser if device.type == "cuda" else LocalOptimiser
