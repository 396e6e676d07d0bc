"""What Megatron asks of a GPU, answered by the CPU: its own layers, buffers and optimiser run where there is none.

Code that says `cuda` gets tensors in main memory, and a stream is nothing.
"""

import contextlib
import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fp8core.training.megatron.arguments import transformer_arguments
from fp8core.training.megatron.conversion import Style

LOCAL = Style(norms_in_linears=False, experts_together=False)


def local_arguments(arch: Any, contract: Any, megatron: Any, deterministic: bool) -> dict[str, Any]:
    found = transformer_arguments(arch, contract, megatron, deterministic)
    fused = [name for name in found if name.endswith(("_fusion", "grouped_gemm"))]
    if contract.training.linear == "fp32":
        found |= {"params_dtype": torch.float32, "bf16": False}
    return found | {"transformer_impl": "local", "use_cpu_initialization": True, **dict.fromkeys(fused, False)}


def local_layers(config: Any) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from fp8core.training.megatron.model import PolicyRouter

    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    block.layer_norm = LocalNorm
    for layer in block.layer_specs:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = LocalNorm
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = LocalAttention
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = LocalNorm
        if hasattr(layer.submodules.mlp.submodules, "router"):
            layer.submodules.mlp.submodules.router = PolicyRouter
    return block


class LocalAttention(torch.nn.Module):
    """The constructor and the call of `megatron.core.transformer.attention.CoreAttention`."""

    def __init__(self, config: Any, layer_number: int, *_: Any, **__: Any) -> None:
        super().__init__()
        self._scale = 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: None, packed_seq_params: Any, **_: Any
    ) -> Tensor:
        """[T, heads, d], [T, KV heads, d] twice to [T, heads, d]; a token sees those before it in its sequence."""
        bounds = packed_seq_params.cu_seqlens_q.tolist()
        parts = [self._attend(*(x[start:end] for x in (query, key, value))) for start, end in pairwise(bounds)]
        return torch.cat(parts)

    def _attend(self, *qkv: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in qkv)
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self._scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)


class LocalNorm(torch.nn.RMSNorm):
    def __init__(self, config: Any, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(hidden_size, eps, dtype=config.params_dtype)
        # Each GPU of the group normalises other tokens, so that Megatron adds up the gradients.
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010 - no such attribute declared


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

    from fp8core.training.megatron import model, policy

    with pytest.MonkeyPatch.context() as patch, _OnCpu():
        patch.setattr(policy, "transformer_arguments", local_arguments)
        patch.setattr(policy.MegatronPolicy, "style", LOCAL)
        patch.setattr(model, "layers", local_layers)
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
