"""Recipes on both sides: the default, and one that no configuration names, go through the decoder."""

from dataclasses import replace

import pytest
import torch

from fp8core.config.loss import LossConfig
from fp8core.config.precision import PrecisionContract
from fp8core.config.training import CorrectionConfig, TrainingConfig
from fp8core.models.weights import is_linear, rollout_formats, training_formats
from fp8core.numerics.linear import Fp8BlockLinear
from fp8core.numerics.recipe import FP32_ACTIVATIONS, GRADIENT_FLOOR, Grouping, Recipe
from fp8core.rl.objective import Objective
from fp8core.rollout.embedded import EmbeddedEngine
from fp8core.rollout.engine import PolicyScales, Sampling
from fp8core.training.exact import ExactTrainer

FORWARD, BACKWARD = Grouping(1, 32, "pow2"), Grouping(1, 32, "pow2", GRADIENT_FLOOR)
GROUPS_OF_32 = Recipe("groups of 32", FORWARD, FORWARD, BACKWARD, BACKWARD, cache="pow2", attention="fp8")
CONTRACT = PrecisionContract(scale_rule="pow2")


def in_groups_of_32(formats):
    linear = Fp8BlockLinear(GROUPS_OF_32)
    layers = tuple(replace(each, qkv=linear, output=linear, gate_up=linear, down=linear) for each in formats.layers)
    return replace(formats, layers=layers, recipe=GROUPS_OF_32)


@pytest.fixture
def masters(architecture, masters_of):
    """Small elements beside large ones: which of them share a scale then decides what they become."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: weight * torch.exp(3 * torch.randn(weight.shape, generator=generator)) / 8 if is_linear(name) else weight
        for name, weight in masters_of(architecture()).items()
    }


@pytest.fixture
def pair(architecture, pair_of, masters):
    """Trainer and engine of one policy under a recipe of the test's own."""
    arch = architecture()
    training, rollout = (
        in_groups_of_32(side(CONTRACT, arch.num_layers)) for side in (training_formats, rollout_formats)
    )
    objective = Objective(LossConfig(), CorrectionConfig())
    trainer = ExactTrainer(arch, masters, training, rollout, TrainingConfig(learning_rate=1e-3), objective)
    usual = pair_of(CONTRACT, arch)
    engine = EmbeddedEngine(arch, rollout, 64)
    engine.update(trainer.export(), usual.scales, 0)
    return replace(usual, trainer=trainer, engine=engine)


def test_another_recipe_needs_no_code_of_its_own(pair, trainer_of, masters, ragged_prompts, groups_of, rollout_batch):
    """Engine and trainer agree bit for bit, before and after an update, and compute otherwise than the shipped ones."""
    groups, sampling = groups_of(ragged_prompts(5, 40), 3), Sampling(1.0, 6, frozenset())
    found = pair.generate(groups, sampling)
    assert not pair.log_ratios(groups, found, 1.0).any()
    usual = replace(pair, trainer=trainer_of(CONTRACT, pair.arch, masters=masters))
    assert usual.log_ratios(groups, found, 1.0).any()
    report = pair.trainer.step(rollout_batch(pair.trainer, pair.scales), 1.0, pair.scales.layers)
    assert 0.5 < report.update_gain < 1.5, "of the codes of this recipe"
    moved = replace(pair, scales=PolicyScales(1, pair.scales.layers))
    moved.engine.update(moved.trainer.export(), moved.scales, 1)
    again = moved.generate(groups, sampling)
    assert [each.logprobs for each in again] != [each.logprobs for each in found]
    assert not moved.log_ratios(groups, again, 1.0).any()


def test_a_stored_contract_of_powers_of_two_keeps_what_it_was():
    """Configurations of earlier versions name the rule and no products of attention."""
    recipe = PrecisionContract.model_validate({"scale_rule": "pow2", "rollout": {"kv_cache": "fp8"}}).recipe
    rules = (recipe.activations.rule, recipe.weights.rule, recipe.gradients.rule, recipe.tokens.rule, recipe.cache)
    assert rules == ("pow2",) * 5
    assert recipe.attention == "fp8"
    assert PrecisionContract().recipe == FP32_ACTIVATIONS
    assert PrecisionContract.model_validate({"attention": "fp8"}).recipe == replace(FP32_ACTIVATIONS, attention="fp8")
