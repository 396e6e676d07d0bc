"""The FP8 of a policy in one object: which elements share a scale, how it is made, what attention multiplies.

    operand       read by        groups of the default     scales of the default
    activations   Y  = X W^T     1 x 128 along `in`        FP32
    weights       all three      128 x 128                 powers of two
    gradients     dX = dY W      1 x 128 along `out`       FP32
    tokens        dW = dY^T X    128 x 1 along the tokens  powers of two

Under an FP32 scale the largest element of a group, which carries nearly all of it in pretrained decoders, has no error.
Groups of tokens have powers of two: a gradient of a weight then does not depend on how tokens are packed."""

from dataclasses import dataclass, replace
from typing import Literal

E4M3_MAX = 448.0
AMAX_FLOOR = 1e-10
GRADIENT_FLOOR = E4M3_MAX * 2.0**-126
TILE = 128
"""Elements of a group that Hopper's block-FP8 products take."""

ScaleRule = Literal["pow2", "fp32"]
RecipeName = Literal["fp32_activations", "pow2", "fp32"]
AttentionProducts = Literal["fp8", "fp16_over_fp8_cache"]
"""What attention over an FP8 cache multiplies: E4M3 Q and P, or FP16, to which codes of K and V are widened."""


@dataclass(frozen=True)
class Grouping:
    """Elements of a matrix that share a scale; its contraction runs along the columns.

    Attributes:
        rows, columns: of a group; the last ones of a matrix may be smaller.
        rule: `pow2`, 2^ceil(log2(amax / 448)), as torch, vLLM and Transformer Engine have it; `fp32`, amax / 448.
        floor: least amax that counts."""

    rows: int
    columns: int
    rule: ScaleRule
    floor: float = AMAX_FLOOR


@dataclass(frozen=True)
class Recipe:
    """Groups of every operand, and what stays in 16 bits.

    Attributes:
        tokens: 1 x n of the transposed operands.
        cache: rule of the scales of K and V, and of Q where its products are E4M3.
        attention: products over an FP8 cache.
        bf16_first_layers, bf16_last_layers: whose linears stay in BF16."""

    name: RecipeName
    activations: Grouping
    weights: Grouping
    gradients: Grouping
    tokens: Grouping
    cache: ScaleRule
    attention: AttentionProducts
    bf16_first_layers: int = 0
    bf16_last_layers: int = 0

    def in_fp8(self, layer: int, layers: int) -> bool:
        return self.bf16_first_layers <= layer < layers - self.bf16_last_layers


def block_recipe(name: RecipeName, rows: ScaleRule, others: ScaleRule, attention: AttentionProducts) -> Recipe:
    """1 x 128 groups and 128 x 128 tiles (DeepSeek-V3, arXiv 2412.19437, section 3.3); `rows`: the rule of activations
    and gradients."""
    return Recipe(
        name=name,
        activations=Grouping(1, TILE, rows),
        weights=Grouping(TILE, TILE, others),
        gradients=Grouping(1, TILE, rows, GRADIENT_FLOOR),
        tokens=Grouping(1, TILE, others, GRADIENT_FLOOR),
        cache=others,
        attention=attention,
    )


FP32_ACTIVATIONS = block_recipe("fp32_activations", "fp32", "pow2", "fp16_over_fp8_cache")
POW2 = block_recipe("pow2", "pow2", "pow2", "fp8")
FP32 = block_recipe("fp32", "fp32", "fp32", "fp8")
RECIPES: dict[RecipeName, Recipe] = {each.name: each for each in (FP32_ACTIVATIONS, POW2, FP32)}


def recipe_of(name: RecipeName, attention: AttentionProducts | None, bf16_layers: tuple[int, int] = (0, 0)) -> Recipe:
    recipe = RECIPES[name]
    (first, last) = bf16_layers
    return replace(
        recipe,
        attention=recipe.attention if attention is None else attention,
        bf16_first_layers=first,
        bf16_last_layers=last,
    )
