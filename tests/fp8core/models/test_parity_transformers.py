"""In FP32 the decoder computes what transformers computes from the same folder."""

import pytest
import torch
from torch import Tensor

from fp8core.models.checkpoint import load_checkpoint
from fp8core.models.decoder import Decoder, FullContext
from fp8core.models.formats import reference_formats
from fp8core.models.weights import load_policy, stored_weights

# Lengths on both sides of the 16 positions that the scaled rotary embedding was "trained" on.
LENGTHS = (40, 1, 23, 16)


def our_logits(folder, tokens: Tensor, valid: Tensor, positions: Tensor) -> Tensor:
    checkpoint = load_checkpoint(folder)
    arch = checkpoint.architecture
    decoder = Decoder(arch, reference_formats(arch.num_layers))
    masters = {name: tensor.float() for name, tensor in checkpoint.tensors.items()}
    weights = load_policy(arch, stored_weights(masters, decoder.formats.stored_names(), decoder.formats.scale_rule))
    hidden = decoder.hidden(weights, tokens, positions, FullContext.of(valid), scales=None)
    return decoder.formats.head.logits(hidden.flatten(0, 1), weights.head).view(*tokens.shape, -1)


@pytest.mark.parametrize("padding", ["left", "right"])
@torch.no_grad()
def test_logits_equal_those_of_transformers(transformers_checkpoint, padding):
    indices, lengths = torch.arange(max(LENGTHS)), torch.tensor(LENGTHS)[:, None]
    valid = indices >= max(LENGTHS) - lengths if padding == "left" else indices < lengths
    positions = (valid.cumsum(1) - 1).clamp(min=0)
    tokens = torch.randint(512, valid.shape, generator=torch.Generator().manual_seed(1))
    ours = our_logits(transformers_checkpoint.folder, tokens, valid, positions)[valid]
    model = transformers_checkpoint.model
    theirs = model(tokens, attention_mask=valid.long(), position_ids=positions).logits[valid]
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()
    assert theirs.std() > 0.5, "the logits must be large enough for the comparison to mean something"
