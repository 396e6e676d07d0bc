"""The measurements of the Megatron trainer say what differs, and how much."""

import pytest
import torch

from benchmarks import megatron_hopper as cases
from benchmarks.megatron_hopper import difference, measurements
from fp8core.config.capability import this_platform
from fp8core.models.architecture import parameter_shapes


def computed(scale: float, shift: float) -> cases.Computed:
    gradients = {"a": torch.tensor([3.0, 4.0]) * scale, "b": torch.tensor([1.0]), "alone": torch.ones(2)}
    return cases.Computed(torch.tensor([[-1.0, -2.0 + shift], [-3.0, 9.0]]), 0.5 * scale, 2.0, gradients)


def test_a_row_says_how_far_two_trainers_are_apart():
    mask = torch.tensor([[True, True], [True, False]])
    theirs = computed(1.0, 0.0)
    theirs = cases.Computed(
        theirs.logprobs, theirs.loss, 2.5, {n: g for n, g in theirs.gradients.items() if n != "alone"}
    )
    row = difference("qwen3", "fp8", "somebody", computed(1.1, 0.25), theirs, mask)
    assert (row["logprob_max"], row["logprob_mean"]) == (pytest.approx(0.25), pytest.approx(0.25 / 3))
    assert row["loss_difference"] == pytest.approx(0.05)
    assert row["grad_norm_difference"] == -0.5
    assert (row["gradients_compared"], row["gradient_worst_name"]) == (2, "a")
    assert row["gradient_worst"] == pytest.approx(0.1, rel=1e-5)
    assert row["gradient_relative"] == pytest.approx(0.5 / 26**0.5, rel=1e-5)


def test_a_random_policy_is_drawn_when_it_is_asked_for_and_always_the_same():
    arch = cases.small("qwen3-moe")
    policy = cases.RandomPolicy(arch)
    assert dict.fromkeys(policy) == dict.fromkeys(parameter_shapes(arch))
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    assert torch.equal(policy[name], policy[name])
    assert not torch.equal(policy[name], policy[name.replace("up", "gate")])
    assert policy[name].float().std() == pytest.approx(arch.hidden_size**-0.5, rel=0.05)


@pytest.mark.skipif(this_platform() != "cpu", reason="a GPU has other measurements")
def test_there_is_a_measurement_for_every_family():
    assert {"parity/llama/fp32", "parity/qwen3/fp32", "parity/qwen3-moe/fp32", "qwen3/fp32"} <= measurements().keys()
