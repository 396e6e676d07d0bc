"""The part inside vLLM's worker process: the policy that it holds, and operations captured.

vLLM mixes `PolicyWorker` into its worker (`worker_extension_cls`).

`CapturingWorker` puts torch's forward hooks on the modules of the decoder, for `fp8core.alignment.operations`. An
engine with it (`VllmEngine(..., worker=CAPTURING)`) must run eagerly, because a compiled forward calls no module.
Several kernels write over their inputs, so every tensor is copied when a hook sees it.
"""

import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fp8core.models.architecture import Architecture
from fp8core.processes import end_with_parent
from fp8core.rollout.engine import PromptGroup, Sampling
from fp8core.rollout.held_policy import HeldPolicy
from fp8core.rollout.vllm import internals

# This module is imported in the worker's process before it builds the model, and before it takes memory of a GPU.
end_with_parent.follow_parent()
internals.register_decode_backend()
internals.register_aligned_models()


class VllmPolicy(HeldPolicy):
    """The policy that a worker of vLLM holds, of which it may have a part."""

    def __init__(self, worker: "PolicyWorker") -> None:
        super().__init__(worker.model_runner.get_model(), worker.device)
        self._worker = worker

    def follow(self, pid: int) -> None:
        """From now on vLLM's processes end with process `pid`."""
        end_with_parent.follow(pid)

    def set_temperature(self, temperature: float) -> None:
        """Set what an aligned model divides its logits by, above 0."""
        self._model.temperature = temperature

    def describe(self) -> dict[str, Any]:
        model, config = self._model, self._worker.vllm_config
        compilation = config.compilation_config
        passes = {k: v for k, v in vars(compilation.pass_config).items() if isinstance(v, bool)}
        return {
            "model": type(model).__name__,
            "linears": internals.describe_linears(model),
            "attention": internals.describe_attention(model),
            "head": internals.head_dtype(model),
            "activations": internals.activation_rule(model),
            "passes": passes,
            "custom_ops": list(compilation.custom_ops),
            "norms": internals.norm_providers(config),
            "compilation": compilation.mode.name,
            "graphs": str(compilation.cudagraph_mode),
            "runner": type(self._worker.model_runner).__module__,
        }

    def _missing(self) -> list[str]:
        return internals.probe(self._model)

    def _has_scales(self) -> bool:
        return str(self._worker.vllm_config.cache_config.cache_dtype).startswith("fp8")

    def _write_scales(self, scales: Sequence[Sequence[float]]) -> None:
        internals.write_scales(self._model, scales)

    def _read_scales(self) -> list[list[float]]:
        return internals.read_scales(self._model)

    def _caches(self) -> Iterable[Tensor]:
        return internals.cache_tensors(self._worker.model_runner)

    def _rank(self) -> int:
        return internals.layer_share()[0]

    def _gather(self, part: Tensor, axis: int) -> Tensor:
        return internals.gather(part, axis)


class PolicyWorker:
    """Our part of vLLM's worker; `policy_` keeps it apart from vLLM's own."""

    device: torch.device
    model_runner: Any
    vllm_config: Any
    policy_class: type[VllmPolicy] = VllmPolicy
    policy_held: VllmPolicy | None = None

    def policy_answer(self, method: str, *arguments: Any) -> Any:
        """A request to the policy, by the name of its method."""
        if self.policy_held is None:
            self.policy_held = self.policy_class(self)
        return self.policy_held.answer(method, *arguments)


CAPTURING = "fp8core.rollout.vllm.worker.CapturingWorker"
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


class CapturingPolicy(VllmPolicy):
    """A policy that can keep what the modules of its decoder make."""

    def capture(self) -> None:
        """Keep what is made from now on, of each module the first it makes."""
        self._hooks, self._seen = list[Any](), dict[str, Tensor]()
        for name, module in self._model.named_modules():
            kind = name.rpartition(".")[2]
            if kind in _WRITES or kind == "qkv_proj":
                self._hooks.append(module.register_forward_hook(self._outputs(name)))
            if kind == "attn":
                self._hooks.append(module.register_forward_pre_hook(self._inputs(name)))
                self._hooks.append(module.register_forward_hook(self._outputs(name)))

    def captured(self, path: str) -> None:
        """Save what was kept, with the logits of every position, as safetensors; keep nothing any more."""
        for hook in self._hooks:
            hook.remove()
        self._seen[f"{_LOGITS}.0"] = self._model.compute_logits(self._seen["model.norm.0"])
        save_file({name: tensor.cpu().contiguous() for name, tensor in self._seen.items()}, path)
        self._hooks, self._seen = [], {}

    def _outputs(self, name: str) -> Any:
        def keep(module: nn.Module, arguments: Any, result: Any) -> None:
            self._keep(name, result if isinstance(result, tuple) else (result,))

        return keep

    def _inputs(self, name: str) -> Any:
        def keep(module: nn.Module, arguments: Any) -> None:
            self._keep(name + _ROTATED, arguments)

        return keep

    def _keep(self, name: str, tensors: Sequence[Any]) -> None:
        for i, tensor in enumerate(tensors):
            if isinstance(tensor, Tensor):
                self._seen.setdefault(f"{name}.{i}", tensor.detach().flatten(1).clone())


class CapturingWorker(PolicyWorker):
    policy_class = CapturingPolicy


def captured_values(engine: Any, arch: Architecture, tokens: Sequence[int]) -> list[dict[str, Tensor]]:
    """An engine's values after each operation of `fp8core.alignment.operations`, of a prefill of all the tokens.

    Args:
        engine: a `VllmEngine` with the capturing worker, eager, that holds a policy.
        tokens: one sequence; the engine's prefix cache is dropped, so that all of it is computed.
    """
    assert engine.drop_prefixes(), "requests are still running"
    group = PromptGroup(0, "captured", tuple(tokens), (0,), (0,))
    with tempfile.TemporaryDirectory(prefix="fp8-grpo-") as folder:
        path = Path(folder) / "captured.safetensors"
        engine.ask_policy("capture")
        for _ in engine.generate([group], Sampling(1.0, 1, frozenset())):
            pass
        engine.ask_policy("captured", str(path))
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
