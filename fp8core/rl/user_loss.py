"""A policy loss of the user's own: a function, found by its import path, with validated options.

    @policy_loss(options=Sharpness)
    def soft(tokens: Tokens, options: Sharpness) -> Tensor: ...

It makes one term of each token. Masks, importance weights, aggregation and denominators stay ours.
"""

import json
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import BaseModel, JsonValue, ValidationError
from torch import Tensor

from fp8core.config.loss import SHIPPED_LOSSES, LossConfig
from fp8core.config.section import refusal
from fp8core.config.steps import NoOptions
from fp8core.errors import UserError, described_error
from fp8core.rl import losses
from fp8core.rl.alignment_metrics import clamp_exponent
from fp8core.user_code import file_of_path, load_code


@dataclass(frozen=True)
class Tokens:
    """The view of a micro-batch that a loss gets: FP64 [B, T], 0 at masked and rejected tokens.

    `current`, of the policy that is updated, carries the gradient. `old` is of the policy before the step, or in bypass
    mode of the rollout policy. `active_mask`, bool [B, T], has the tokens that need a term.
    """

    current: Tensor
    old: Tensor
    advantages: Tensor
    active_mask: Tensor
    clip: losses.ClipRange

    @property
    def ratio(self) -> Tensor:
        """current / old as probabilities, its logarithm limited to +-20."""
        return clamp_exponent(self.current - self.old).exp()


LossFunction = Callable[[Tokens, Any], Tensor]


def policy_loss(*, options: type[BaseModel] = NoOptions) -> Callable[[LossFunction], LossFunction]:
    """Declare a policy loss: a function of tokens and options that returns terms to minimise, float [B, T]."""

    def declare(function: LossFunction) -> LossFunction:
        function.options = options  # type: ignore[attr-defined]
        return function

    return declare


@dataclass(frozen=True)
class UserLoss:
    """A loss of the user's own, as the objective calls it: w * term, aggregated."""

    path: str
    function: LossFunction
    options: BaseModel

    def __call__(
        self, inputs: losses.LossInputs, clip: losses.ClipRange, aggregate: losses.Aggregate
    ) -> losses.LossOutput:
        """Raises UserError: the function raises, or returns anything but one finite term a token."""
        x = losses.MaskedInputs.of(inputs)
        tokens = Tokens(x.current, x.old, x.advantages, inputs.active_mask, clip)
        terms = self._terms(tokens)
        return losses.loss_output(
            inputs, x.weights * torch.where(tokens.active_mask, terms, 0.0), aggregate, tokens.ratio
        )

    def _terms(self, tokens: Tokens) -> Tensor:
        try:
            terms = self.function(tokens, self.options)
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            raise self._error(f"{frame.filename}:{frame.lineno}: {described_error(error)}") from error
        shape = tokens.active_mask.shape
        if not (isinstance(terms, Tensor) and terms.shape == shape and terms.is_floating_point()):
            result = f"{terms.dtype} {[*terms.shape]}" if isinstance(terms, Tensor) else type(terms).__name__
            raise self._error(f"returned {result}, not floating-point terms {[*shape]}, one for each token")
        wrong = tokens.active_mask & ~terms.isfinite()
        if wrong.any():
            row, token = wrong.nonzero()[0].tolist()
            value = terms[row, token].item()
            raise self._error(f"returned {value} for token {token} of row {row} of its micro-batch")
        if tokens.current.requires_grad and not terms.requires_grad:
            raise self._error("returned terms that do not depend on tokens.current: nothing would be learnt")
        return terms

    def _error(self, reason: str) -> UserError:
        return UserError(f"loss.policy={self.path}: {reason}")


def load_loss(path: str, options: Mapping[str, JsonValue]) -> UserLoss:
    """The loss at `module:function` or `path/to/file.py:function`, tried on a few made-up tokens.
    Raises UserError: it cannot be imported, is not declared as a loss, refuses its options, or as `UserLoss` does."""
    try:
        function = load_code(path, "function").target
    except UserError as error:
        raise UserError(f"loss.policy={path}: {error}") from error
    model = getattr(function, "options", None)
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        attribute = path.rpartition(":")[2]
        raise UserError(f"loss.policy={path}: {attribute} is not declared with @policy_loss of fp8core.rl.user_loss")
    try:
        loss_options = model.model_validate_json(json.dumps(options), strict=True)
    except ValidationError as error:
        raise refusal(error, model, options, prefix="loss.options") from error
    loss = UserLoss(path, function, loss_options)
    _try(loss)
    return loss


def shared_loss(loss: LossConfig) -> LossConfig:
    """A loss as processes with another working folder find it."""
    if loss.policy in SHIPPED_LOSSES or (file := file_of_path(loss.policy)) is None:
        return loss
    return loss.model_copy(update={"policy": f"{file}:{loss.policy.rpartition(':')[2]}"})


def _try(loss: UserLoss) -> None:
    current = torch.tensor([[-0.5, -1.0, -2.0], [-0.1, -3.0, 0.0]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, True, True], [True, True, False]])
    inputs = losses.LossInputs(
        current=current,
        old=current.detach() + torch.tensor([0.1, 0.0, -0.1]),
        advantages=torch.tensor([1.0, -0.5]),
        loss_mask=mask,
        denominator=losses.Denominator.of(mask),
    )
    loss(inputs, losses.ClipRange(low=0.2, high=0.28), losses.token_mean).loss.backward()
