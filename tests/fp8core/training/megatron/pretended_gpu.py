"""What Megatron asks of a GPU, answered by the CPU, so that its buffers and optimiser run where there is none.

Tests alone use it: code that says `cuda` gets tensors in main memory, and a stream is nothing.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode


class _OnCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        found = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(found, str):
            return found.replace("torch.", "torch.cuda.", 1)
        return found


class _Stream:
    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, _: Any) -> None:
        pass

    def record_event(self) -> "_Stream":
        return self

    def synchronize(self) -> None:
        pass


def _moved(value: Any, as_numpy: bool = False, **_: Any) -> Any:
    """Numbers of tokens on the way to the host, which a tensor in main memory does not have to go."""
    return value.numpy() if as_numpy and isinstance(value, torch.Tensor) else value


class FusedAdam(torch.optim.Optimizer):
    """AdamW with the count of updates in the group, where Transformer Engine's optimiser has it."""

    def __init__(self, params: Any, lr: float, betas: Any, eps: float, weight_decay: float, **_: Any) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                self._update(group, param)

    def _update(self, group: dict[str, Any], param: torch.Tensor) -> None:
        state, (beta1, beta2) = self.state[param], group["betas"]
        for key in ("exp_avg", "exp_avg_sq"):
            state.setdefault(key, torch.zeros_like(param))
        param.mul_(1 - group["lr"] * group["weight_decay"])
        state["exp_avg"].lerp_(param.grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
        spread = (state["exp_avg_sq"] / (1 - beta2 ** group["step"])).sqrt_().add_(group["eps"])
        param.addcdiv_(state["exp_avg"], spread, value=-group["lr"] / (1 - beta1 ** group["step"]))


@contextlib.contextmanager
def pretended_gpu() -> Iterator[None]:
    """While it lasts, the CPU stands in for a GPU with Transformer Engine's optimiser."""
    import megatron.core.optimizer as optimisers
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    with pytest.MonkeyPatch.context() as patch, _OnCpu():
        patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
        patch.setattr(torch.cuda, "synchronize", lambda *_: None)
        for name in ("Stream", "current_stream", "default_stream"):
            patch.setattr(torch.cuda, name, _Stream)
        patch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
        # Nothing is drawn at random.
        patch.setattr(random.CudaRNGStatesTracker, "fork", lambda *_, **__: contextlib.nullcontext())
        patch.setattr(random, "_get_cuda_rng_state", lambda *_, **__: None)
        patch.setattr(random, "_set_cuda_rng_state", lambda *_, **__: None)
        patch.setattr(token_dispatcher, "maybe_move_tensor_to_cpu", _moved)
        patch.setattr(optimisers, "Adam", FusedAdam)
        patch.setattr(optimisers, "USING_PYTORCH_OPTIMIZER", False)
        patch.setattr(distrib_optimizer, "Adam", FusedAdam)
        patch.setattr(distrib_optimizer, "HAVE_APEX_OR_TE", True)
        patch.setattr(distrib_optimizer, "USING_TE_OPTIMIZER", True)
        yield
