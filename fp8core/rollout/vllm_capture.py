"""What vLLM's modules make of one sequence, for `fp8core.alignment.operations`.

`CapturingWorker` puts torch's forward hooks on the modules of the decoder; an engine that uses it (`VllmEngine(...,
worker=CAPTURING)`) must run eagerly, because a compiled forward calls no module. Several kernels write over what they
read, so every tensor is copied when it is seen.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fp8core.models.architecture import Architecture
from fp8core.rollout.engine import PromptGroup, Sampling
from fp8core.rollout.vllm_worker import PolicyWorker

CAPTURING = "fp8core.rollout.vllm_capture.CapturingWorker"
_LOGITS, _ROTATED = "logits", ".rotary_emb"
_WRITES = {
    "embed_tokens": ("delta",),
    "input_layernorm": ("normed", "residual"),
    "q_norm": ("q",),
    "k_norm": ("k",),
    "o_proj": ("delta",),
    "post_attention_layernorm": ("normed", "residual"),
    "gate_up_proj": ("gate_up",),
    "act_fn": ("activated",),
    "down_proj": ("delta",),
    "mlp": ("delta",),
    "norm": ("normed", "residual"),
}


class CapturingWorker(PolicyWorker):
    """A worker that can keep what the modules of its decoder make."""

    policy_hooks: list[Any]
    policy_seen: dict[str, Tensor]

    def policy_capture(self) -> None:
        """Keep what is made from now on, of each module the first it makes."""
        self.policy_hooks, self.policy_seen = [], {}
        for name, module in self._policy_model().named_modules():
            kind = name.rpartition(".")[2]
            if kind in _WRITES or kind == "qkv_proj":
                self.policy_hooks.append(module.register_forward_hook(self._policy_outputs(name)))
            if kind == "attn":
                self.policy_hooks.append(module.register_forward_pre_hook(self._policy_inputs(name)))
                self.policy_hooks.append(module.register_forward_hook(self._policy_outputs(name)))

    @torch.inference_mode()
    def policy_captured(self, path: str) -> None:
        """Save what was kept, with the logits of every position, as safetensors; keep nothing any more."""
        for hook in self.policy_hooks:
            hook.remove()
        logits = self.model_runner.get_model().compute_logits(self.policy_seen["model.norm.0"])
        self.policy_seen[f"{_LOGITS}.0"] = logits
        save_file({name: tensor.cpu().contiguous() for name, tensor in self.policy_seen.items()}, path)
        self.policy_hooks, self.policy_seen = [], {}

    def _policy_outputs(self, name: str) -> Any:
        def keep(module: nn.Module, arguments: Any, result: Any) -> None:
            self._policy_keep(name, result if isinstance(result, tuple) else (result,))

        return keep

    def _policy_inputs(self, name: str) -> Any:
        def keep(module: nn.Module, arguments: Any) -> None:
            self._policy_keep(name + _ROTATED, arguments)

        return keep

    def _policy_keep(self, name: str, tensors: Sequence[Any]) -> None:
        for i, tensor in enumerate(tensors):
            if isinstance(tensor, Tensor):
                self.policy_seen.setdefault(f"{name}.{i}", tensor.detach().flatten(1).clone())


def captured_values(engine: Any, arch: Architecture, tokens: Sequence[int]) -> list[dict[str, Tensor]]:
    """An engine's values after each operation of `fp8core.alignment.operations`, of a prefill of all the tokens.

    Args:
        engine: a `VllmEngine` with the capturing worker, eager, that holds a policy.
        arch: of the policy.
        tokens: one sequence; the engine's prefix cache is dropped, so that all of it is computed.
    """
    assert engine.drop_prefixes(), "requests are still running"
    group = PromptGroup(0, "captured", tuple(tokens), (0,), (0,))
    with tempfile.TemporaryDirectory(prefix="fp8-grpo-") as folder:
        path = Path(folder) / "captured.safetensors"
        engine.call_worker("policy_capture")
        for _ in engine.generate([group], Sampling(1.0, 1, frozenset())):
            pass
        engine.call_worker("policy_captured", str(path))
        # Rows beyond the tokens are padding of the batch.
        seen = {name: tensor[: len(tokens)].float() for name, tensor in load_file(path).items()}
    assert all(len(tensor) == len(tokens) for tensor in seen.values()), "the prompt was computed in parts"
    return _in_order(seen, arch)


def _in_order(seen: dict[str, Tensor], arch: Architecture) -> list[dict[str, Tensor]]:
    """From tensors by module and place to all values after each operation."""
    found: list[dict[str, Tensor]] = [{"delta": seen["model.embed_tokens.0"]}]
    sizes = [heads * arch.head_dim for heads in (arch.num_heads, arch.num_kv_heads, arch.num_kv_heads)]

    def add(**written: Tensor) -> None:
        found.append(found[-1] | written)

    def add_outputs(name: str) -> None:
        writes = _WRITES[name.rpartition(".")[2]]
        add(**{value: seen[f"{name}.{i}"] for i, value in enumerate(writes) if f"{name}.{i}" in seen})

    for layer in range(arch.num_layers):
        prefix = f"model.layers.{layer}"
        attention = f"{prefix}.self_attn"
        add_outputs(f"{prefix}.input_layernorm")
        if layer == 0:
            found[-1]["residual"] = found[0]["delta"]
        add(**dict(zip("qkv", seen[f"{attention}.qkv_proj.0"].split(sizes, dim=-1), strict=True)))
        if arch.qk_norm:
            add_outputs(f"{attention}.q_norm")
            add_outputs(f"{attention}.k_norm")
        add(**{value: seen[f"{attention}.attn{_ROTATED}.{i}"] for i, value in enumerate("qk")})
        add(attended=seen[f"{attention}.attn.0"])
        add_outputs(f"{attention}.o_proj")
        parts = ("mlp",) if layer in arch.sparse_layers else ("mlp.gate_up_proj", "mlp.act_fn", "mlp.down_proj")
        for name in ("post_attention_layernorm", *parts):
            add_outputs(f"{prefix}.{name}")
    add_outputs("model.norm")
    add(logits=seen[f"{_LOGITS}.0"])
    return found
