"""The aligned model in vLLM for CPUs: its name, its weights' places, and its forward, which is the reference's."""

import multiprocessing
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from aligned_cases import CONTRACT, SCALES, TEMPERATURE, TOKENS, begin, build, compute_share, computed, specs, write
from conftest import ON_GPU, SHAPE

from fp8core.models.architecture import Architecture, Experts
from fp8core.models.checkpoint import initial_weights
from fp8core.models.decoder import Decoder, FullContext
from fp8core.models.weights import load_policy, rollout_formats, stored_weights
from fp8core.numerics.logprobs import log_softmax
from fp8core.numerics.rotary import Llama3Scaling, YarnScaling
from fp8core.rollout.aligned import NAMES

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(ON_GPU, reason="tests/gpu/test_aligned_engine.py runs all of it")]
YARN = YarnScaling(factor=4.0, original_max_position_embeddings=64)
QWEN3 = Architecture(
    **{**SHAPE, "hidden_size": 256, "intermediate_size": 384, "num_heads": 4, "num_kv_heads": 2, "head_dim": 128}
    | {"rope_scaling": YARN}
)
SCALING = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
LLAMA = replace(QWEN3, family="llama", tie_embeddings=True, rope_scaling=SCALING)
# vLLM's Qwen2 divides the hidden size among the heads.
QWEN2 = replace(QWEN3, family="qwen2", hidden_size=512)
SPARSE = replace(
    QWEN3,
    family="qwen3_moe",
    intermediate_size=512,
    experts=Experts(
        count=4, per_token=2, intermediate_size=256, normalise_top_k=True, sparse_step=1, dense_layers=(0,)
    ),
)
# Heads of 64, and no part of a fused linear that ends with a tile.
PARTIAL = replace(LLAMA, hidden_size=192, intermediate_size=336, num_heads=9, num_kv_heads=3, head_dim=64)
EACH = pytest.mark.parametrize(
    "arch", [LLAMA, QWEN2, QWEN3, PARTIAL, SPARSE], ids=["llama", "qwen2", "qwen3", "partial tiles", "experts"]
)


@pytest.fixture(scope="module")
def vllm_cpu(vllm_build, tmp_path_factory):
    """vLLM in this process, one of one."""
    begin(0, 1, tmp_path_factory.mktemp("vllm") / "store")


def policy_of(arch):
    """The tensors that are shipped."""
    masters = {name: w * 2 if w.dim() == 2 else w for name, w in initial_weights(arch, seed=0).items()}
    masters |= {name: torch.linspace(-1, 1, len(w)) for name, w in masters.items() if name.endswith(".bias")}
    return stored_weights(masters, rollout_formats(CONTRACT, arch.num_layers).stored_names(), CONTRACT.recipe.weights)


def assert_reference(found, arch, tensors):
    formats, positions = rollout_formats(CONTRACT, arch.num_layers), torch.arange(TOKENS.shape[1])
    weights, context = load_policy(arch, tensors), FullContext.of(torch.ones_like(TOKENS, dtype=torch.bool))
    expected = Decoder(arch, formats).hidden(weights, TOKENS, positions[None], context, SCALES)[0]
    assert found["hidden"].dtype == torch.bfloat16
    assert torch.equal(found["hidden"].float(), expected)
    logprobs = log_softmax(formats.head.logits(expected, weights.head), TEMPERATURE).float()
    assert torch.equal(found["logprobs"], logprobs)


@EACH
def test_the_forward_is_the_reference(vllm_cpu, tmp_path, arch):
    tensors = policy_of(arch)
    model = build(arch, "aligned", tmp_path)
    write(model, arch, tensors, 0, 1)
    assert_reference(computed(model, arch), arch, tensors)


def test_processes_that_share_the_layers_compute_the_reference(vllm_build, tmp_path):
    """No sum is cut: two have the bytes of one."""
    wide = [replace(arch, intermediate_size=512) for arch in (LLAMA, QWEN2, QWEN3)]
    policies = [(arch, policy_of(arch)) for arch in (*wide, SPARSE)]
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=compute_share, args=(i, 2, tmp_path, policies)) for i in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    assert [process.exitcode for process in processes] == [0, 0]
    for i in range(2):
        found = torch.load(tmp_path / f"{i}" / "computed.pt")
        for each, (arch, tensors) in zip(found, policies, strict=True):
            assert_reference(each, arch, tensors)


@pytest.mark.parametrize("arch", [LLAMA, QWEN2, QWEN3], ids=lambda arch: arch.family)
def test_weights_lie_as_in_vllms_own_model(vllm_cpu, tmp_path, arch):
    aligned, stock = build(arch, "aligned", tmp_path), build(arch, "stock", tmp_path)
    assert type(aligned).__name__ == NAMES[type(stock).__name__]
    assert isinstance(aligned, type(stock))
    assert specs(aligned) == specs(stock)
    # Sleep keeps buffers, and drops what else lies on the device.
    assert {"cosines", "sines", "not_finite"} == {name for name, _ in aligned.named_buffers()} - {
        name for name, _ in stock.named_buffers()
    }


def new_builder(draft_tokens):
    """From steps to queries and work, for at most 7 requests and four query heads a KV head."""
    from fp8core.rollout.vllm.aligned import AlignedBuilder

    config = SimpleNamespace(
        num_speculative_tokens=draft_tokens,
        scheduler_config=SimpleNamespace(max_num_seqs=5),
        compilation_config=SimpleNamespace(max_cudagraph_capture_size=7),
        parallel_config=None,
        model_config=SimpleNamespace(
            max_model_len=64, get_num_attention_heads=lambda parallel: 8, get_num_kv_heads=lambda parallel: 2
        ),
    )
    return AlignedBuilder(None, ["layer"], config, torch.device("cpu"))


@pytest.fixture
def builder(vllm_cpu):
    return new_builder(0)


def step(lengths, starts, *, known=None):
    """As vLLM describes one; `known`: lengths that the host has."""
    starts = torch.tensor(starts, dtype=torch.int32)
    return SimpleNamespace(
        block_table_tensor=torch.zeros(len(lengths), 4, dtype=torch.int32),
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        seq_lens_cpu_upper_bound=None if known is None else torch.tensor(known, dtype=torch.int32),
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
    given = step([0, 0, 0, 0], [0, 1, 4, 5, 15], known=[9, 3, 1, 40])
    built = builder.build(0, given)
    assert built.decodes.starts is given.query_start_loc
    (batch,) = built.prompts
    assert batch.lengths.tolist() == [9, 3, 1, 40]
    assert batch.pairs.tolist() == [[1, 0], [3, 0], [3, 32]]
    # First pair, first row, keys that the first token sees, tokens.
    assert batch.work.tolist() == [[1, 5, 31, 10], [0, 1, 1, 3]]


@pytest.mark.parametrize(("requests", "rows"), [(2, 5), (3, 7)])
def test_rows_of_drafts_are_queries_whose_tensors_stay(vllm_cpu, requests, rows):
    """Of two requests with a draft of one and of two, in a graph for as many rows or for two more."""
    builder = new_builder(2)
    given = step([9, 30, 0][:requests], [0, 2, 5, 5][: requests + 1], known=[10, 32, 0][:requests])
    given.num_actual_tokens = rows
    given.block_table_tensor = torch.arange(12, dtype=torch.int32).view(3, 4)
    built, again = builder.build_for_cudagraph_capture(given), builder.build(0, given)
    assert built.prompts == []
    assert built.decodes.lengths.tolist() == [8, 9, 28, 29, 30, 0, 0][:rows]
    assert built.decodes.starts.tolist() == [*range(rows + 1)]
    assert built.decodes.block_table[:5, 0].tolist() == [0, 0, 4, 4, 4]
    assert [a.data_ptr() for a in built.decodes] == [b.data_ptr() for b in again.decodes]


def test_prompts_of_a_large_step_come_after_the_rows_of_drafts(vllm_cpu):
    """What the host has for a request with a draft, it counts as if the draft before it had been accepted."""
    built = new_builder(2).build(0, step([9, 30, 40], [0, 2, 5, 17], known=[11, 33, 40]))
    assert built.decodes.lengths.tolist() == [8, 9, 28, 29, 30]
    (batch,) = built.prompts
    assert batch.work.tolist() == [[0, 5, 29, 12]]
    assert batch.pairs.tolist() == [[2, 0], [2, 32]]
    assert built.block_table.shape == (3, 4)
