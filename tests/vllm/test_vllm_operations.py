"""Every operation of vLLM on its own inputs, against the reference's."""

import pytest
import torch
from conftest import CONTRACT, ON_GPU, TRUNCATES, build_groups

from fp8core.alignment.operations import compare, operations
from fp8core.models.formats import rollout_formats
from fp8core.models.weights import load_policy
from fp8core.numerics.rounding import STEPWISE
from fp8core.rollout.vllm_capture import captured_values

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(ON_GPU, reason="a compiled forward calls no modules")]
ELEMENTWISE = {"input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "rotary_emb", "attn", "act_fn"}


@pytest.fixture
def differing(engine, policies):
    """Share of elements that each kind of operation makes differently, by the rounding points of the reference."""
    trainer = policies[0].trainer
    (group,) = build_groups(1, 1, longest=40, shortest=40)
    values = captured_values(engine, trainer.arch, group.prompt)
    weights, tokens = load_policy(trainer.arch, trainer.export()), torch.tensor(group.prompt)

    def measure(points):
        formats = rollout_formats(CONTRACT, trainer.arch.num_layers).with_points(points)
        errors = compare(operations(trainer.arch, formats, weights, tokens, None), values)
        # Of layers the last: the first norm adds nothing.
        return {error.operation.rpartition(".")[2]: error.local_differing for error in errors}

    return measure


def test_vllm_rounds_where_the_contract_says(differing):
    shares = differing(rollout_formats(CONTRACT, 1).points)
    assert shares.pop("logits") < 1, "FP32 sums in another order differ somewhere"
    assert {kind for kind in shares if kind in ELEMENTWISE} == ELEMENTWISE
    if TRUNCATES:
        cut_off = [shares.pop(kind) for kind in ("rotary_emb", "attn")]
        assert cut_off == pytest.approx([0.5, 0.5], abs=0.05), "half of the values lie nearer to the next one up"
    assert max(shares.values()) < 0.01


def test_it_does_not_round_where_the_contract_does_not_say(differing):
    shares = differing(STEPWISE)
    others = {"input_layernorm", "post_attention_layernorm", "norm", "rotary_emb", "attn"}
    assert {kind for kind, share in shares.items() if share > 0.05 and kind != "logits"} == others
