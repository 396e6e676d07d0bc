"""The part inside vLLM's worker process: weights written in place, scales set, both read back, operations captured.

vLLM mixes `PolicyWorker` into its worker (`worker_extension_cls`) and the engine calls these methods by name. Arguments
and results are numbers, strings, bytes, lists and dicts.

`CapturingWorker` puts torch's forward hooks on the modules of the decoder, for `fp8core.alignment.operations`. An
engine with it (`VllmEngine(..., worker=CAPTURING)`) must run eagerly, because a compiled forward calls no module.
Several kernels write over their inputs, so every tensor is copied when a hook sees it.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fp8core.models.architecture import Architecture
from fp8core.processes import end_with_parent
from fp8core.rollout.engine import PromptGroup, Sampling
from fp8core.rollout.held_weights import HeldWeights
from fp8core.rollout.shared_weights import SharedWeights, TensorSpec, open_shared
from fp8core.rollout.slots import Cut, Shares, Slot
from fp8core.rollout.vllm import internals

# This module is imported in the worker's process before it builds the model, and before it takes memory of a GPU.
end_with_parent.follow_parent()
internals.register_decode_backend()
internals.register_aligned_models()


class PolicyWorker:
    """Methods of the worker that belong to the policy it holds; `policy_` keeps them apart from vLLM's own."""

    device: torch.device
    model_runner: Any
    vllm_config: Any
    policy_version: int | None = None
    policy_held: HeldWeights | None = None

    def policy_follow(self, pid: int) -> None:
        """From now on vLLM's processes end with process `pid`."""
        end_with_parent.follow(pid)

    @torch.inference_mode()
    def policy_probe(self) -> list[str]:
        """The parts that this vLLM lacks; where it lacks nothing, scales are marked as never written."""
        missing = internals.probe(self._policy_model())
        if not missing:
            self._policy_forget_scales()
        return missing

    def policy_parameters(self) -> dict[str, list[Any]]:
        specs = {name: TensorSpec.of(tensor) for name, tensor in self._policy_model().named_parameters()}
        return {name: [spec.dtype, list(spec.shape)] for name, spec in specs.items()}

    @torch.inference_mode()
    def policy_begin(self, shares: Shares | None) -> None:
        """Hold no version and no scales until another policy is written; `shares` are new, or None as they were."""
        self.policy_version = None
        self._policy_forget_scales()
        if shares is not None:
            own = shares[internals.layer_share()[0]]
            share = {name: (Slot(*slot), Cut(*cut[0]) if cut else None) for name, (slot, *cut) in own.items()}
            self.policy_held = HeldWeights(self._policy_parameters(), share)
        self._policy_places().clear_filling()

    @torch.inference_mode()
    def policy_write(self, received: SharedWeights) -> list[str]:
        """Copy this process's part of every shared tensor into its rows, and return the names of the tensors."""
        tensors = open_shared(received, self.device)
        self._policy_places().write(self._policy_parameters(), tensors)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return list(tensors)

    def policy_end(self, version: int) -> None:
        self.policy_version = version

    @torch.inference_mode()
    def policy_set_scales(self, scales: list[list[float]]) -> None:
        """Scales of Q, K and V by layer: the last thing that is written."""
        internals.write_scales(self._policy_model(), scales)

    @torch.inference_mode()
    def policy_read_back(self) -> dict[str, Any]:
        """Version, lane sums of every tensor or its part from the parameters themselves, and the scales in force."""
        sums = self._policy_places().sums(self._policy_parameters(), internals.gather)
        return {"version": self.policy_version, "sums": sums, "scales": self.policy_held_scales()}

    @torch.inference_mode()
    def policy_held_scales(self) -> list[list[float]]:
        """Scales of Q, K and V by layer, as they are in force."""
        return internals.read_scales(self._policy_model())

    def policy_set_temperature(self, temperature: float) -> None:
        """Set what an aligned model divides its logits by, above 0."""
        model: Any = self._policy_model()
        model.temperature = temperature

    @torch.inference_mode()
    def policy_clear_cache(self) -> None:
        """Zero the KV cache: after sleep it holds whatever bytes were there, NaN among them."""
        for cache in internals.cache_tensors(self.model_runner):
            cache.zero_()

    def policy_describe(self) -> dict[str, Any]:
        model, compilation = self._policy_model(), self.vllm_config.compilation_config
        passes = {k: v for k, v in vars(compilation.pass_config).items() if isinstance(v, bool)}
        return {
            "model": type(model).__name__,
            "linears": internals.describe_linears(model),
            "attention": internals.describe_attention(model),
            "head": internals.head_dtype(model),
            "activations": internals.activation_rule(model),
            "passes": passes,
            "custom_ops": list(compilation.custom_ops),
            "norms": internals.norm_providers(self.vllm_config),
            "compilation": compilation.mode.name,
            "graphs": str(compilation.cudagraph_mode),
            "runner": type(self.model_runner).__module__,
        }

    def policy_memory(self) -> dict[str, int]:
        """Bytes of the device in use by this process's tensors, and free on it; zeros on a CPU."""
        if self.device.type != "cuda":
            return {"allocated": 0, "free": 0}
        return {
            "allocated": torch.cuda.memory_allocated(self.device),
            "free": torch.cuda.mem_get_info(self.device)[0],
        }

    def _policy_model(self) -> torch.nn.Module:
        model: torch.nn.Module = self.model_runner.get_model()
        return model

    def _policy_forget_scales(self) -> None:
        """NaN until they are set. Without an FP8 cache vLLM's own 1.0 stays: some kernels multiply by it."""
        model = self._policy_model()
        if not str(self.vllm_config.cache_config.cache_dtype).startswith("fp8"):
            return
        internals.write_scales(model, [[torch.nan] * 3 for _ in internals.read_scales(model)])

    def _policy_parameters(self) -> dict[str, nn.Parameter]:
        return dict(self._policy_model().named_parameters())

    def _policy_places(self) -> HeldWeights:
        assert self.policy_held is not None, "policy_begin() comes first"
        return self.policy_held


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
