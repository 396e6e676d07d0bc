"""The order of a batch's passes: one after another, or through the stages of a pipeline.

The pipeline is Megatron's own schedule without virtual stages (1F1B: a stage that has filled those behind it goes back
through one pass for each that it goes forward). All stages hold the whole batch, so that they agree on the packs, their
number and their order without a word; how long a pack is, a stage tells the next one (`variable_seq_lengths`). The head
and the loss are the last stage's.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from fp8core.training.megatron.groups import stages
from fp8core.training.megatron.model import PolicyModel
from fp8core.training.megatron.packing import Pass
from fp8core.training.megatron.policy import Policy

Scored = Callable[[Pass, Tensor, Tensor], None]
"""Takes a pass on the policy's device, and log-prob and entropy of each written token, FP32 [written]."""
Loss = Callable[[Pass, Tensor], Tensor]
"""Makes of a pass and its log-probs, differentiable, its share of the loss: a scalar on any device."""


def score(policy: Policy, passes: Sequence[Pass], temperature: float, scored: Scored) -> None:
    """Go forward through all passes, under the caller's `no_grad`; `scored` is called in the last stage alone."""

    def finish(turn: Pass, states: Tensor) -> Tensor:
        scored(turn, *policy.head(turn, states, temperature))
        return states

    policy.begin(training=False)
    if stages() > 1:
        _pipelined(policy, passes, finish, forward_only=True)
        return
    for turn in _here(policy, passes):
        finish(turn, policy.hidden(turn))


def accumulate(policy: Policy, passes: Sequence[Pass], temperature: float, loss: Loss) -> None:
    """Add up the gradients of all passes; `loss` is called in the last stage alone."""

    def finish(turn: Pass, states: Tensor) -> Tensor:
        return loss(turn, policy.head(turn, states, temperature)[0])

    policy.begin(training=True)
    if stages() > 1:
        _pipelined(policy, passes, finish, forward_only=False)
        return
    for turn in _here(policy, passes):
        finish(turn, policy.hidden(turn)).backward()


def _here(policy: Policy, passes: Sequence[Pass]) -> Iterator[Pass]:
    return (turn.to(policy.device) for turn in passes)


def _pipelined(
    policy: Policy, passes: Sequence[Pass], finish: Callable[[Pass, Tensor], Tensor], forward_only: bool
) -> None:
    def last(turn: Pass, states: Tensor) -> tuple[Tensor, Tensor, None]:
        # The schedule divides a loss by the number of passes unless it is told of tokens, which it only adds up.
        return finish(turn, states), torch.tensor(len(turn.pack.written), dtype=torch.int), None

    def forward(turns: Iterator[Pass], _: PolicyModel) -> tuple[Tensor, Callable[[Tensor], object]]:
        turn = next(turns)
        return policy.hidden(turn), partial(last, turn)

    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=_here(policy, passes),
        model=policy.model,
        num_microbatches=len(passes),
        # Of one packed sequence as far as the schedule knows; it asks for a length and then takes the stages' word.
        seq_length=len(passes[0].pack.tokens),
        micro_batch_size=1,
        forward_only=forward_only,
    )
