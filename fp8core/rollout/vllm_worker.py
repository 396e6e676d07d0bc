"""What runs inside vLLM's worker process: weights written in place, scales set, both read back.

vLLM mixes `PolicyWorker` into its worker (`worker_extension_cls`) and the engine calls these methods by name. Arguments
and results are numbers, strings, bytes, lists and dicts.
"""

from typing import Any

import torch
from torch import Tensor

from fp8core import lifeline
from fp8core.numerics.fingerprint import fingerprints
from fp8core.rollout import vllm_internals
from fp8core.rollout.vllm_layout import Slot, TensorSpec, rows_of
from fp8core.rollout.vllm_transfer import Parcel, unpack

# This module is imported in the worker's process before it builds the model, and before it takes memory of a GPU.
lifeline.follow_parent()
vllm_internals.register_decode_backend()
vllm_internals.register_aligned_models()


class PolicyWorker:
    """Methods of the worker that belong to the policy it holds; `policy_` keeps them apart from vLLM's own."""

    device: torch.device
    model_runner: Any
    vllm_config: Any
    policy_version: int | None = None

    def policy_follow(self, pid: int) -> None:
        """From now on vLLM's processes end with process `pid`."""
        lifeline.follow(pid)

    @torch.inference_mode()
    def policy_probe(self) -> list[str]:
        """What this vLLM lacks; where it lacks nothing, scales are marked as never written."""
        missing = vllm_internals.probe(self._policy_model())
        if not missing:
            self._policy_forget_scales()
        return missing

    def policy_parameters(self) -> dict[str, list[Any]]:
        """dtype and shape of every parameter."""
        specs = {name: TensorSpec.of(tensor) for name, tensor in self._policy_model().named_parameters()}
        return {name: [spec.dtype, list(spec.shape)] for name, spec in specs.items()}

    @torch.inference_mode()
    def policy_write(self, version: int, received: Parcel, slots: dict[str, list[Any]]) -> None:
        """Copy every tensor of a parcel into its rows; storage stays, and with it captured graphs."""
        self.policy_version = None
        self._policy_forget_scales()
        tensors = unpack(received, self.device)
        for name, rows in self._policy_rows(slots).items():
            tensor = tensors[name]
            assert TensorSpec.of(rows) == TensorSpec.of(tensor), name
            rows.copy_(tensor)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.policy_version = version

    @torch.inference_mode()
    def policy_set_scales(self, scales: list[list[float]]) -> None:
        """Scales of Q, K and V by layer: the last thing that is written."""
        vllm_internals.write_scales(self._policy_model(), scales)

    @torch.inference_mode()
    def policy_read_back(self, slots: dict[str, list[Any]]) -> dict[str, Any]:
        """Version, fingerprint of every tensor from the parameters themselves, and the scales in force."""
        rows = self._policy_rows(slots)
        return {
            "version": self.policy_version,
            "fingerprints": dict(zip(rows, fingerprints(list(rows.values())), strict=True)),
            "scales": vllm_internals.read_scales(self._policy_model()),
        }

    def policy_set_temperature(self, temperature: float) -> None:
        """What an aligned model divides its logits by, above 0."""
        model: Any = self._policy_model()
        model.temperature = temperature

    @torch.inference_mode()
    def policy_clear_cache(self) -> None:
        """Zero the KV cache: after sleep it holds whatever bytes were there, NaN among them."""
        for cache in vllm_internals.cache_tensors(self.model_runner):
            cache.zero_()

    def policy_describe(self) -> dict[str, Any]:
        """Kernels, types, passes and backends as they were resolved."""
        model, compilation = self._policy_model(), self.vllm_config.compilation_config
        passes = {k: v for k, v in vars(compilation.pass_config).items() if isinstance(v, bool)}
        return {
            "model": type(model).__name__,
            "linears": vllm_internals.describe_linears(model),
            "attention": vllm_internals.describe_attention(model),
            "head": vllm_internals.head_dtype(model),
            "power_of_two_activations": vllm_internals.power_of_two_activations(model),
            "passes": passes,
            "custom_ops": list(compilation.custom_ops),
            "norms": vllm_internals.norm_providers(self.vllm_config),
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
        vllm_internals.write_scales(model, [[torch.nan] * 3 for _ in vllm_internals.read_scales(model)])

    def _policy_rows(self, slots: dict[str, list[Any]]) -> dict[str, Tensor]:
        """Views of the parameters, by the names of what was shipped."""
        parameters = dict(self._policy_model().named_parameters())
        placed = {name: Slot(*fields) for name, fields in slots.items()}
        return {name: rows_of(parameters[slot.parameter].data)[slot.start : slot.stop] for name, slot in placed.items()}
