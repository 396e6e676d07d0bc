"""Supports are those of vLLM's own sampler, in its order, where no two logits are equal."""

import pytest
import torch

from fp8core.numerics.support import truncated
from fp8core.numerics.truncation import Truncation

sampling = pytest.importorskip("vllm.v1.sample.ops.topk_topp_sampler", reason="needs vLLM")


@pytest.mark.parametrize("cut", [Truncation(top_k=20), Truncation(top_p=0.95), Truncation(30, 0.9, 0.02)], ids=str)
def test_a_support_has_the_tokens_that_vllm_leaves(cut: Truncation) -> None:
    logits = 3 * torch.randn(64, 1000, generator=torch.Generator().manual_seed(0))
    tempered = logits / 0.8
    # As `MinPLogitsProcessor`, which comes before top-k and top-p.
    p = tempered.softmax(-1)
    tempered.masked_fill_(p < cut.min_p * p.amax(-1, keepdim=True), -torch.inf)
    k, top_p = torch.full((64,), cut.top_k or 1000), torch.full((64,), cut.top_p)
    expected = sampling.apply_top_k_top_p(tempered, k, top_p)
    assert torch.equal(truncated(logits, 0.8, cut).isfinite(), expected.isfinite())
    assert 1 < expected.isfinite().sum(-1).float().mean() < 900
