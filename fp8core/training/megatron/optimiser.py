"""Megatron's distributed optimiser of one process, and checkpoints in Megatron's format.

It owns the FP32 masters of this process and its gradients. `finish` completes gradients over all processes and returns
their global norm; `step` clips by that norm and updates; `clear` drops the gradients."""

import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict, is_main_replica
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner, mcore_to_pyt_state_dict
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from fp8core.config.training import TrainingConfig
from fp8core.training.megatron.model import PolicyModel

# Every parameter on its own: a grid of another shape can read it.
_SHARDING = {"distrib_optim_sharding_type": "fully_reshardable"}


class MegatronOptimiser:
    def __init__(self, model: PolicyModel, training: TrainingConfig) -> None:
        buffers = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True, average_in_collective=False
        )
        self._model = DistributedDataParallel(model.config, buffers, model)
        config = OptimizerConfig(
            optimizer="adam",
            lr=training.learning_rate,
            weight_decay=training.optimiser.weight_decay,
            adam_beta1=training.optimiser.beta1,
            adam_beta2=training.optimiser.beta2,
            clip_grad=training.max_grad_norm,
            bf16=model.config.bf16,
            params_dtype=model.config.params_dtype,
            use_distributed_optimizer=True,
        )
        # Without overrides Megatron would spare norms the weight decay.
        self._adam = get_megatron_optimizer(config, [self._model], config_overrides={})
        self._parameters_by_name: dict[str, Tensor] = dict(model.named_parameters())
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
        is_finite, again, _ = self._adam.step()
        assert is_finite, "Megatron did not update"
        assert float(again) == norm, f"Megatron saw a gradient norm of {again} instead of {norm}"

    def masters(self) -> dict[str, Tensor]:
        """FP32 masters by Megatron's names: of a parameter in BF16 the part that this process updates."""
        return {name: self._master(parameter) for name, parameter in self._parameters_by_name.items()}

    def _master(self, parameter: Tensor) -> Tensor:
        main: Tensor | None = getattr(parameter, "main_param", None)
        return parameter.detach() if main is None else main.detach()

    def save(self, folder: Path, model: ShardedStateDict) -> None:
        """Write the parts of all processes; what several hold is written by one of them."""
        folder.mkdir(exist_ok=True)
        state = self._state(model, loading=False)
        dist_checkpointing.save(state, str(folder), sharded_strategy=ThreadedWriter())

    def load(self, folder: Path, model: ShardedStateDict) -> None:
        with warnings.catch_warnings():
            # Megatron calls torch's loader by its old name.
            warnings.filterwarnings("ignore", "`load_state_dict` is deprecated", FutureWarning)
            state = dist_checkpointing.load(self._state(model, loading=True), str(folder))
        for name, parameter in self._parameters_by_name.items():
            parameter.data.copy_(state["model"][name])
        self._adam.load_state_dict(state["optimizer"])

    def _state(self, model: ShardedStateDict, loading: bool) -> dict[str, Any]:
        optimizer = self._adam.sharded_state_dict(model, is_loading=loading, metadata=_SHARDING)
        return {"model": model, "optimizer": optimizer}


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
        writer = FileSystemWriter(checkpoint_dir, thread_count=2)
        planner = MCoreSavePlanner(flatten_state_dict=False)
        save(mcore_to_pyt_state_dict(parts), storage_writer=writer, planner=planner)
