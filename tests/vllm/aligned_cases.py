"""The aligned model in vLLM for CPUs, in one process or in several that share its layers.

There vLLM has no block-FP8 linears, no experts and no FP8 cache. So models are built in the process that computes,
linears and experts get parameters of the right types, and the reference's attention stands where vLLM's is; the rest is
the code of a GPU.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fp8core.config.engines import VllmConfig
from fp8core.config.precision import PrecisionContract
from fp8core.models.architecture import Architecture
from fp8core.numerics.attention import FP8_CACHE_FORMS
from fp8core.numerics.kv_scales import LayerScales
from fp8core.rollout.shared_weights import TensorSpec
from fp8core.rollout.slots import filled_shapes, find_shares
from fp8core.rollout.vllm.settings import model_config

CONTRACT, METHOD = PrecisionContract(rounding_points="kernels"), "fp8_grpo_test_codes"
SCALES = (LayerScales(0.0625, 0.03125, 0.125), LayerScales(0.125, 0.0625, 0.0625))
TOKENS = torch.randint(4, 200, (1, 60), generator=torch.Generator().manual_seed(0))
TEMPERATURE = 0.7


class ReferenceAttention(nn.Module):
    """A whole sequence at once, with the scales of one layer."""

    def __init__(self, scales: LayerScales, dim: int) -> None:
        super().__init__()
        self.scales, self.dim, self.form = scales, dim, FP8_CACHE_FORMS[CONTRACT.recipe.attention]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.float().view(len(x), -1, self.dim).transpose(0, 1)[None] for x in (q, k, v))
        mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()[None, None]
        out = self.form.attend(q, *self.form.store(k, v, self.scales), mask, self.scales)
        return out[0].transpose(0, 1).flatten(1).bfloat16()


def register(layer: nn.Module, name: str, rows: int, columns: int, *experts: int) -> None:
    for parameter, shape, dtype in (
        (name, (rows, columns), torch.float8_e4m3fn),
        (f"{name}_scale_inv", (-(-rows // 128), -(-columns // 128)), torch.float32),
    ):
        empty = torch.empty(*experts, *shape, dtype=dtype)
        layer.register_parameter(parameter, nn.Parameter(empty, requires_grad=False))


def begin(rank: int, ranks: int, store: Path) -> None:
    """Make vLLM ready in this process, with parameters for codes and scales of tiles."""
    from vllm.config import VllmConfig as EngineConfig
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization import register_quantization_config

    from fp8core.rollout.vllm.in_place import InPlaceConfig
    from fp8core.rollout.vllm.internals import register_aligned_models

    class CodesMethod(UnquantizedLinearMethod):
        def create_weights(
            self, layer: Any, input_size_per_partition: int, output_partition_sizes: list[int], **others: Any
        ) -> None:
            register(layer, "weight", sum(output_partition_sizes), input_size_per_partition)

    class ExpertCodesMethod(FusedMoEMethodBase):
        def create_weights(self, layer: Any, **sizes: Any) -> None:
            names = ("num_experts", "hidden_size", "intermediate_size_per_partition")
            experts, hidden, width = (sizes[name] for name in names)
            register(layer, "w13_weight", 2 * width, hidden, experts)
            register(layer, "w2_weight", hidden, width, experts)

        def get_fused_moe_quant_config(self, layer: Any) -> None:
            """None: the aligned model multiplies."""

    @register_quantization_config(METHOD)
    class CodesConfig(InPlaceConfig):
        def get_name(self) -> str:
            return METHOD

        def get_quant_method(self, layer: Any, prefix: str) -> Any:
            if isinstance(layer, RoutedExperts):
                return ExpertCodesMethod(layer.moe_config)
            if prefix.endswith(".gate"):
                return UnquantizedLinearMethod()
            return CodesMethod() if isinstance(layer, LinearBase) else None

    register_aligned_models()
    with set_current_vllm_config(EngineConfig()):
        init_distributed_environment(ranks, rank, f"file://{store}", 0, "gloo")
        ensure_model_parallel_initialized(ranks, 1)


def build(arch: Architecture, model: str, folder: Path) -> Any:
    """A model of vLLM by the name that its config.json has, which is written to the folder."""
    from vllm import EngineArgs
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model

    config = model_config(arch, CONTRACT, VllmConfig(model=model))
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    arguments = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        quantization=METHOD,
        enforce_eager=True,
        max_model_len=256,
    )
    engine_config = arguments.create_engine_config()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with set_current_vllm_config(engine_config):
            return initialize_model(vllm_config=engine_config)
    finally:
        torch.set_default_dtype(torch.float32)


def specs(model: nn.Module) -> dict[str, TensorSpec]:
    return {name: TensorSpec.of(parameter) for name, parameter in model.named_parameters()}


@torch.inference_mode()
def write(model: nn.Module, arch: Architecture, tensors: dict[str, Tensor], rank: int, ranks: int) -> None:
    """As the worker of this rank writes them."""
    parameters, sent = dict(model.named_parameters()), {name: TensorSpec.of(t) for name, t in tensors.items()}
    share = find_shares(sent, filled_shapes(arch), specs(model), ranks, 0)[rank]
    for slot, _ in share.values():
        if slot.filled_up:
            parameters[slot.parameter].data.view(torch.uint8).zero_()
    for name, (slot, cut) in share.items():
        tensor = tensors[name] if cut is None else cut.of(tensors[name])
        slot.of(parameters[slot.parameter].data).copy_(tensor)


@torch.inference_mode()
def computed(model: Any, arch: Architecture) -> dict[str, Tensor]:
    """Hidden states and log-probs of `TOKENS`."""
    for layer, scales in zip(model.model.layers, SCALES, strict=True):
        layer.self_attn.attn = ReferenceAttention(scales, arch.head_dim)
    hidden = model(TOKENS[0], torch.arange(TOKENS.shape[1]))
    model.temperature = TEMPERATURE
    return {"hidden": hidden, "logprobs": model.compute_logits(hidden)}


def compute_share(rank: int, ranks: int, folder: Path, policies: list[tuple[Architecture, dict[str, Tensor]]]) -> None:
    """In a process of its own: what rank `rank` has computed with each policy, as a file."""
    # vLLM names the memory that processes share after it, where it starts them.
    os.environ["VLLM_DIST_IDENT"] = f"{os.getppid()}"
    begin(rank, ranks, folder / "store")
    own = folder / f"{rank}"
    own.mkdir()
    found = []
    for arch, tensors in policies:
        model = build(arch, "aligned", own)
        write(model, arch, tensors, rank, ranks)
        found.append(computed(model, arch))
    torch.save(found, own / "computed.pt")
    # The other may still read what this process has shared.
    torch.distributed.barrier()
