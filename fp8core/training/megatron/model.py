"""Megatron Core's GPT up to the final norm: the head is ours, so that no call holds all logits."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_reduce

from fp8core.config.precision import HeadFormat
from fp8core.config.training import MegatronConfig
from fp8core.models.architecture import Architecture
from fp8core.models.decoder import rotary_frequencies
from fp8core.models.experts import NO_ROUTE
from fp8core.models.router_losses import RouterLosses, with_gradient
from fp8core.numerics.elementwise import Rounding, keep_fp32
from fp8core.numerics.grouped import top_k
from fp8core.numerics.logprobs import ChunkedHead
from fp8core.training.megatron.conversion import padded_vocabulary


class PolicyModel(GPTModel):
    """GPT whose forward ends with hidden states, and whose rotary angles are our decoder's."""

    def __init__(
        self, arch: Architecture, megatron: MegatronConfig, config: TransformerConfig, device: torch.device
    ) -> None:
        super().__init__(
            config,
            layers(config),
            vocab_size=padded_vocabulary(arch, megatron.tensor_parallel),
            max_sequence_length=arch.max_positions,
            share_embeddings_and_output_weights=arch.tie_embeddings,
            parallel_output=True,
            position_embedding_type="rope",
        )
        self.rotary_pos_emb = RotaryAngles(arch, device)

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """[T, 1, hidden], whole on every GPU of a tensor-parallel group."""
        if self.config.sequence_parallel:
            # The head adds up the gradients of the group by itself.
            states: Tensor = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
            return states
        return hidden_states

    def head_weight(self) -> Tensor:
        is_tied = self.share_embeddings_and_output_weights
        weight: Tensor = self.shared_embedding_or_output_weight() if is_tied else self.output_layer.weight
        return weight


def layers(config: TransformerConfig) -> TransformerBlockSubmodules:
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=True, normalization="RMSNorm")
    for layer in block.layer_specs:
        if hasattr(layer.submodules.mlp.submodules, "router"):
            layer.submodules.mlp.submodules.router = PolicyRouter
    return block


class RotaryAngles(torch.nn.Module):
    """Replaces Megatron's `RotaryEmbedding`, which has the factors of Llama 3.1 alone."""

    def __init__(self, arch: Architecture, device: torch.device) -> None:
        super().__init__()
        self._frequencies = rotary_frequencies(arch).to(device)

    def get_rotary_seq_len(self, context: Any, decoder: Any, hidden: Any, config: Any, packed: Any) -> int:
        return int(packed.max_seqlen_q)

    def forward(self, positions: int, **_: Any) -> Tensor:
        """FP32 [positions, 1, 1, head_dim], each of the two halves the same."""
        steps = torch.arange(positions, dtype=torch.float32, device=self._frequencies.device)
        angles = steps[:, None] * self._frequencies
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]


class Replay:
    """Replaces Megatron's `RouterReplay`, which cannot leave a position to the router.

    Of equal scores the router takes the lower index, as the reference does. `chosen` is int16 [T, k], `NO_ROUTE`
    where the router chooses, or None without a replay."""

    def __init__(self) -> None:
        self.chosen: Tensor | None = None

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: Any, group_topk: Any, compute: Callable[..., tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Scores and indices [T, k] of the experts: Megatron's call."""
        indices = top_k(scores, topk)
        if self.chosen is not None:
            indices = torch.where(self.chosen == NO_ROUTE, indices, self.chosen.long())
        return scores.gather(1, indices), indices


class PolicyRouter(TopKRouter):
    """Megatron's own moves its weight to a GPU. `rounding`: the point `routed`. `losses`: of the
    pass in progress, with gradients."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.router_replay = Replay()
        self.rounding: Rounding = keep_fp32
        self.losses: RouterLosses | None = None

    def gating(self, hidden: Tensor) -> Tensor:
        return self.rounding(torch.nn.functional.linear(hidden.float(), self.weight.float()))

    def routing(self, logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        probs, choice = super().routing(logits, *args, **kwargs)
        # A layer that is computed again runs first without gradients.
        if self.losses is not None and torch.is_grad_enabled():
            gradient = self.losses.gradient(logits.flatten(0, -2), choice.byte().topk(self.topk).indices)
            probs = with_gradient(probs, logits, gradient.view_as(logits))
        return probs, choice


@dataclass(frozen=True)
class VocabularyShare:
    """This GPU's rows of the head, from token `first`; tokens from `size` on are padding."""

    first: int
    size: int
    group: ProcessGroup
    form: HeadFormat


class ShardedHead(ChunkedHead):
    """One GPU's rows; the gradient of the hidden states is summed over the group."""

    partial_dtype = torch.float32

    def __init__(self, weight: Tensor, share: VocabularyShare, temperature: float) -> None:
        super().__init__(weight, temperature)
        self._share = share

    def logits(self, hidden: Tensor) -> Tensor:
        """FP32 [tokens, rows], -inf in the rows of padding."""
        share = self._share
        weight_t = self.weight.t()
        logits = (hidden @ weight_t).float() if share.form == "bf16" else _fp32_product(hidden, weight_t)
        logits[:, max(0, share.size - share.first) :] = -torch.inf
        return logits

    def _logprobs(self, hidden: Tensor) -> Tensor:
        logits = self.logits(hidden).div_(self.temperature)
        top = logits.amax(-1, keepdim=True)
        all_reduce(top, ReduceOp.MAX, self._share.group)
        total = self.total((logits - top).exp_().sum(-1, keepdim=True))
        return logits.sub_(top + total.log())

    def statistics(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logp = self._logprobs(hidden)
        row, is_own = self._own(targets)
        target_logprobs = logp.gather(-1, row[:, None]).squeeze(-1).masked_fill(~is_own, 0.0)
        # p log p is 0 where p is, which the product of 0 and -inf is not.
        return target_logprobs, -(logp.exp() * logp.clamp_min(-1e30)).sum(-1)

    def slopes(
        self, hidden: Tensor, targets: Tensor, entropy: Tensor, gradients: tuple[Tensor | None, Tensor | None]
    ) -> Tensor:
        grad, grad_entropy = gradients
        logp = self._logprobs(hidden)
        flatter = None
        if grad_entropy is not None:
            # Of H by the logits, -p (log p + H); p log p is 0 where p is, as in the forward.
            above = logp.clamp_min(-1e30).add_(entropy[:, None])
            flatter = above.mul_(logp.exp()).mul_(-grad_entropy[:, None])
        p = logp.exp_()
        row, is_own = self._own(targets)
        p.scatter_add_(1, row[:, None], -is_own.float()[:, None])
        p.mul_(0.0 if grad is None else -grad[:, None] / self.temperature)
        if flatter is not None:
            p.add_(flatter, alpha=1 / self.temperature)
        return p.to(self.weight.dtype)

    def hidden_gradient(self, slopes: Tensor) -> Tensor:
        return _fp32_product(slopes, self.weight)

    def add_weight_gradient(self, total: Tensor, slopes: Tensor, hidden: Tensor) -> None:
        total += _fp32_product(slopes.t(), hidden)

    def total(self, x: Tensor) -> Tensor:
        all_reduce(x, ReduceOp.SUM, self._share.group)
        return x

    def returned(self, grad_weight: Tensor) -> Tensor:
        """Add the gradient to the FP32 buffer that Megatron keeps, and return what autograd is to see: the protocol of
        Megatron's own linears (`tensor_parallel/layers.py`)."""
        buffer: Tensor | None = getattr(self.weight, "main_grad", None)
        if buffer is None:
            return grad_weight.to(self.weight.dtype)
        buffer.add_(grad_weight)
        setattr(self.weight, "grad_added_to_main_grad", True)  # noqa: B010 - Tensor declares no such attribute
        return torch.zeros_like(self.weight)

    def _own(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Row of each target, 0 where another GPU holds it, and bool: whether this one does."""
        local = targets - self._share.first
        rows = len(self.weight)
        return local.clamp(0, rows - 1), (local >= 0) & (local < rows)


def _fp32_product(a: Tensor, b: Tensor) -> Tensor:
    """On a CPU sums of BF16 are rounded once more."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda and a.dtype == torch.bfloat16 else (a @ b).float()
