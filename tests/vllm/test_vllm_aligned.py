"""The aligned model in vLLM for CPUs: its name, its weights' places, and its forward, which is the reference's.

There vLLM has neither block-FP8 linears nor an FP8 cache. So models are built in this process, linears get parameters
of the right types, and the reference's attention stands where vLLM's is; the rest is the code that runs on a GPU.
"""

import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch
from conftest import ON_GPU, SHAPE
from torch import nn

from fp8core.config.precision import PrecisionContract
from fp8core.config.section import VllmConfig
from fp8core.models.architecture import Architecture, RopeScaling
from fp8core.models.checkpoint import initial_weights
from fp8core.models.decoder import Decoder, FullContext
from fp8core.models.weights import load_policy, rollout_formats, stored_weights
from fp8core.numerics.attention import Fp8Attention
from fp8core.numerics.kv_scales import LayerScales
from fp8core.numerics.logprobs import log_softmax
from fp8core.rollout.engine import TensorSpec
from fp8core.rollout.vllm.settings import ALIGNED, model_config
from fp8core.rollout.vllm.weights import check_fit, filled_shapes, find_slots

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(ON_GPU, reason="tests/gpu/test_aligned_engine.py runs all of it")]
CONTRACT, METHOD = PrecisionContract(rounding_points="kernels"), "fp8_grpo_test_codes"
SCALES = (LayerScales(0.0625, 0.03125, 0.125), LayerScales(0.125, 0.0625, 0.0625))
TOKENS = torch.randint(4, 200, (1, 60), generator=torch.Generator().manual_seed(0))
QWEN3 = Architecture(
    **{**SHAPE, "hidden_size": 256, "intermediate_size": 384, "num_heads": 4, "num_kv_heads": 2, "head_dim": 128}
)
SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=32)
LLAMA = replace(QWEN3, family="llama", qk_norm=False, tie_embeddings=True, rope_scaling=SCALING)
# vLLM's Qwen2 divides the hidden size among the heads.
QWEN2 = replace(QWEN3, family="qwen2", qk_norm=False, qkv_bias=True, hidden_size=512)
# Heads of 64, and no part of a fused linear that ends with a tile.
PARTIAL = replace(LLAMA, hidden_size=192, intermediate_size=336, num_heads=9, num_kv_heads=3, head_dim=64)
EACH = pytest.mark.parametrize("arch", [LLAMA, QWEN2, QWEN3, PARTIAL], ids=["llama", "qwen2", "qwen3", "partial tiles"])


class ReferenceAttention(nn.Module):
    """A whole sequence at once, with the scales of one layer."""

    def __init__(self, scales: LayerScales, dim: int) -> None:
        super().__init__()
        self.scales, self.dim, self.form = scales, dim, Fp8Attention()

    def forward(self, q, k, v):
        q, k, v = (x.float().view(len(x), -1, self.dim).transpose(0, 1)[None] for x in (q, k, v))
        mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()[None, None]
        out = self.form.attend(q, *self.form.store(k, v, self.scales), mask, self.scales)
        return out[0].transpose(0, 1).flatten(1).bfloat16()


@pytest.fixture(scope="module")
def vllm_cpu(vllm_build, tmp_path_factory):
    """vLLM in this process, one of one, with parameters for codes and scales of tiles."""
    from vllm.config import VllmConfig as EngineConfig
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization import register_quantization_config

    from fp8core.rollout.vllm.in_place import InPlaceConfig
    from fp8core.rollout.vllm.internals import register_aligned_models

    class CodesMethod(UnquantizedLinearMethod):
        def create_weights(self, layer, input_size_per_partition, output_partition_sizes, **others):
            rows, columns = sum(output_partition_sizes), input_size_per_partition
            for name, shape, dtype in (
                ("weight", (rows, columns), torch.float8_e4m3fn),
                ("weight_scale_inv", (-(-rows // 128), -(-columns // 128)), torch.float32),
            ):
                layer.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False))

    @register_quantization_config(METHOD)
    class CodesConfig(InPlaceConfig):
        def get_name(self):
            return METHOD

        def get_quant_method(self, layer, prefix):
            return CodesMethod() if isinstance(layer, LinearBase) else None

    register_aligned_models()
    with set_current_vllm_config(EngineConfig()):
        init_distributed_environment(1, 0, f"file://{tmp_path_factory.mktemp('vllm') / 'store'}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)


@pytest.fixture
def build(vllm_cpu, tmp_path):
    """A model of vLLM by the name that its config.json has."""
    from vllm import EngineArgs
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model

    def built(arch, model):
        config = model_config(arch, CONTRACT, VllmConfig(model=model))
        del config["quantization_config"]
        (tmp_path / "config.json").write_text(json.dumps(config))
        arguments = EngineArgs(
            model=str(tmp_path),
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

    return built


def specs(model):
    return {name: TensorSpec.of(parameter) for name, parameter in model.named_parameters()}


@torch.inference_mode()
def write(model, arch, tensors):
    """As the worker writes them."""
    parameters, sent = dict(model.named_parameters()), {name: TensorSpec.of(t) for name, t in tensors.items()}
    slots = find_slots(sent, filled_shapes(arch))
    check_fit(sent, slots, specs(model))
    for slot in slots.values():
        if slot.filled_up:
            parameters[slot.parameter].data.view(torch.uint8).zero_()
    for name, slot in slots.items():
        slot.of(parameters[slot.parameter].data).copy_(tensors[name])


@EACH
def test_the_forward_is_the_reference(build, arch):
    masters = {name: w * 2 if w.dim() == 2 else w for name, w in initial_weights(arch, seed=0).items()}
    masters |= {name: torch.linspace(-1, 1, len(w)) for name, w in masters.items() if name.endswith(".bias")}
    formats = rollout_formats(CONTRACT, arch.num_layers)
    tensors = stored_weights(masters, formats.stored_names(), "pow2")
    model = build(arch, "aligned")
    write(model, arch, tensors)
    for layer, scales in zip(model.model.layers, SCALES, strict=True):
        layer.self_attn.attn = ReferenceAttention(scales, arch.head_dim)
    positions = torch.arange(TOKENS.shape[1])
    with torch.inference_mode():
        hidden = model(TOKENS[0], positions)
        model.temperature = 0.7
        logprobs = model.compute_logits(hidden)
    weights, context = load_policy(arch, tensors), FullContext.of(torch.ones_like(TOKENS, dtype=torch.bool))
    expected = Decoder(arch, formats).hidden(weights, TOKENS, positions[None], context, SCALES)[0]
    assert hidden.dtype == torch.bfloat16
    assert torch.equal(hidden.float(), expected)
    assert torch.equal(logprobs, log_softmax(formats.head.logits(expected, weights.head), 0.7).float())


@pytest.mark.parametrize("arch", [LLAMA, QWEN2, QWEN3], ids=lambda arch: arch.family)
def test_weights_lie_as_in_vllms_own_model(build, arch):
    aligned, stock = build(arch, "aligned"), build(arch, "stock")
    assert type(aligned).__name__ == ALIGNED[type(stock).__name__]
    assert isinstance(aligned, type(stock))
    assert specs(aligned) == specs(stock)
    # Sleep keeps buffers, and drops what else lies on the device.
    assert {"cosines", "sines", "not_finite"} == {name for name, _ in aligned.named_buffers()} - {
        name for name, _ in stock.named_buffers()
    }


def test_the_engine_takes_it_for_a_generating_decoder(vllm_cpu):
    from vllm import ModelRegistry

    def inspected(name):
        """As vLLM caches it, with lists for tuples: some of these may come from its cache."""
        return json.loads(json.dumps(asdict(ModelRegistry.models[name].inspect_model_cls())))

    # Each takes seconds in a process of its own; Mistral is ours for Llama by another name.
    for name in ("MistralForCausalLM", "Qwen3ForCausalLM"):
        assert inspected(ALIGNED[name]) == inspected(name) | {"architecture": ALIGNED[name]}


@pytest.fixture
def builder(vllm_cpu):
    """From steps to queries and work, for at most 7 requests and four query heads a KV head."""
    from fp8core.rollout.vllm.aligned import AlignedBuilder

    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=5),
        compilation_config=SimpleNamespace(max_cudagraph_capture_size=7),
        parallel_config=None,
        model_config=SimpleNamespace(
            max_model_len=64, get_num_attention_heads=lambda parallel: 8, get_num_kv_heads=lambda parallel: 2
        ),
    )
    return AlignedBuilder(None, ["layer"], config, torch.device("cpu"))


def step(lengths, starts):
    """As vLLM describes one."""
    starts = torch.tensor(starts, dtype=torch.int32)
    return SimpleNamespace(
        block_table_tensor=torch.zeros(len(lengths), 4, dtype=torch.int32),
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        max_query_len=int(starts.diff().max()),
        num_actual_tokens=int(starts[-1]),
    )


def test_a_decode_step_reads_what_stays_where_it_is(builder):
    """Of a graph for four requests two are padding."""
    given = step([9, 30, 0, 0], [0, 1, 2, 2, 2])
    built, again = builder.build(0, given), builder.build(0, given).decodes
    assert built.prompts == []
    queries = built.decodes
    assert queries.lengths is given.seq_lens
    assert queries.block_table is given.block_table_tensor
    assert queries.starts.tolist() == [0, 1, 2, 3, 4]
    assert [a.data_ptr() for a in queries] == [b.data_ptr() for b in again]


def test_a_step_with_prompts_has_work_for_them_and_queries_for_the_others(builder):
    """Of four requests the second and the last have more than one new token, the last after a cached prefix."""
    given = step([9, 3, 1, 40], [0, 1, 4, 5, 15])
    built = builder.build(0, given)
    assert built.decodes.starts is given.query_start_loc
    (batch,) = built.prompts
    assert batch.lengths.tolist() == [9, 3, 1, 40]
    assert batch.pairs.tolist() == [[1, 0], [3, 0], [3, 32]]
    # First pair, first row, keys that the first token sees, tokens.
    assert batch.work.tolist() == [[1, 5, 31, 10], [0, 1, 1, 3]]
