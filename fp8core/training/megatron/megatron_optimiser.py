"""Megatron Core's gradient buffers and AdamW: FP32 gradients, masters and moments, shared out among GPUs if asked."""

from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from torch import Tensor

from fp8core.config.run import TrainingConfig
from fp8core.training.megatron.checkpoint import load_state, save_state
from fp8core.training.megatron.model import PolicyModel

# Every parameter on its own: a grid of another shape can read it.
_SHARDING = {"distrib_optim_sharding_type": "fully_reshardable"}


class MegatronOptimiser:
    """Gradients are summed over data-parallel processes, clipped by their global norm; weight decay as in torch."""

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
        """Forget all gradients."""
        self._model.zero_grad_buffer()
        self._adam.zero_grad()

    def finish(self) -> float:
        """Complete the gradients over all processes and return their global norm."""
        finalize_model_grads([self._model])
        self._adam.prepare_grads()
        return float(self._adam.get_grad_norm())

    def step(self, norm: float, learning_rate: float) -> None:
        """Clip by the norm that `finish` returned, which Megatron computes again, and update."""
        for group in self._adam.param_groups:
            group["lr"] = learning_rate
        updated, again, _ = self._adam.step()
        assert updated, "Megatron did not update"
        assert float(again) == norm, f"Megatron saw a gradient norm of {again} instead of {norm}"

    def gradients(self) -> dict[str, Tensor]:
        """FP32, of this process, by Megatron's names, after `finish`."""
        return {name: getattr(parameter, "main_grad") for name, parameter in self._named.items()}  # noqa: B009

    def masters(self) -> dict[str, Tensor]:
        """FP32 masters by Megatron's names: of a parameter in BF16 the part that this process updates."""
        return {name: self._master(parameter) for name, parameter in self._named.items()}

    def _master(self, parameter: Tensor) -> Tensor:
        main: Tensor | None = getattr(parameter, "main_param", None)
        return parameter.detach() if main is None else main.detach()

    def save(self, folder: Path, model: ShardedStateDict) -> None:
        """Write parameters, masters and moments in Megatron's format."""
        save_state(folder, self._state(model, loading=False))

    def load(self, folder: Path, model: ShardedStateDict, updates: int) -> None:
        """Take what `save` wrote; Megatron counts the updates itself."""
        loaded = load_state(folder, self._state(model, loading=True))
        for name, parameter in self._named.items():
            parameter.data.copy_(loaded["model"][name])
        self._adam.load_state_dict(loaded["optimizer"])

    def _state(self, model: ShardedStateDict, loading: bool) -> dict[str, Any]:
        optimizer = self._adam.sharded_state_dict(model, is_loading=loading, metadata=_SHARDING)
        return {"model": model, "optimizer": optimizer}
