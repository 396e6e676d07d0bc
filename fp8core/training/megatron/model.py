"""Megatron Core's GPT up to the final norm: the head is ours (`head`), so that no call holds all logits."""

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from fp8core.config.megatron import MegatronConfig
from fp8core.models.architecture import Architecture
from fp8core.training.megatron.arguments import model_arguments
from fp8core.training.megatron.layer_spec import layers
from fp8core.training.megatron.packing import Pack
from fp8core.training.megatron.rotary import RotaryAngles


class PolicyModel(GPTModel):
    """GPT whose forward ends with hidden states, and whose rotary angles are our decoder's."""

    def __init__(
        self,
        arch: Architecture,
        megatron: MegatronConfig,
        config: TransformerConfig,
        device: torch.device,
        first: bool,
        last: bool,
    ) -> None:
        arguments = model_arguments(arch, megatron)
        super().__init__(config, layers(config), pre_process=first, post_process=last, **arguments)
        self.rotary_pos_emb = RotaryAngles(arch, device)

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """[T, 1, hidden], whole on every GPU of a tensor-parallel group; of other stages what they hand on."""
        if self.post_process and self.config.sequence_parallel:
            # The head adds up the gradients of the group by itself.
            gathered: Tensor = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
            return gathered
        return hidden_states

    def head_weight(self) -> Tensor:
        """This GPU's rows of the output head."""
        tied = self.share_embeddings_and_output_weights
        weight: Tensor = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        return weight


def packed_call(pack: Pack) -> dict[str, Any]:
    """Arguments of the model's forward for packed sequences."""
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=pack.bounds,
        cu_seqlens_kv=pack.bounds,
        max_seqlen_q=pack.longest,
        max_seqlen_kv=pack.longest,
    )
    return {
        "input_ids": pack.tokens[None],
        "position_ids": pack.positions[None],
        "attention_mask": None,
        "packed_seq_params": packed,
    }
