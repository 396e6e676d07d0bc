"""In FP32 the decoder computes what transformers computes from the same folder."""

import pytest
import torch
from torch import Tensor

from fp8core.models.checkpoint import find_checkpoint
from fp8core.models.decoder import Decoder, FullContext
from fp8core.models.weights import load_policy, reference_formats, stored_weights
from fp8core.numerics.logprobs import token_logprobs
from fp8core.rl.batch import TokenBatch


def test_gradients_equal_those_of_transformers(transformers_checkpoint):
    """The norms, SwiGLU, the linears and the head each have a backward of their own."""
    checkpoint, model = find_checkpoint(transformers_checkpoint.folder), transformers_checkpoint.model
    arch = checkpoint.architecture
    prompts, completions = [[5, 6, 7], [8], [9, 10, 11, 12]], [[13, 14], [15, 16, 17, 18, 19], [20]]
    batch = TokenBatch.of(prompts, completions)
    written, weights = batch.response_mask[:, 1:], torch.linspace(-1, 2, 8)

    masters = {name: tensor.float().requires_grad_() for name, tensor in checkpoint.source().items()}
    decoder = Decoder(arch, reference_formats(arch.num_layers))
    policy = load_policy(
        arch, stored_weights(masters, decoder.formats.stored_names(), decoder.formats.recipe.weights), masters
    )
    hidden = decoder.hidden(policy, batch.tokens, batch.positions, FullContext.of(batch.valid), scales=())
    targets = batch.tokens[:, 1:][written]
    ours, _ = token_logprobs(hidden[:, :-1][written], policy.head, decoder.formats.head, targets, temperature=0.8)
    gradients = torch.autograd.grad(
        (ours * weights).sum(), list(masters.values()), allow_unused=True, materialize_grads=True
    )

    logits = model(batch.tokens, attention_mask=batch.valid.long(), position_ids=batch.positions).logits
    theirs = (logits / 0.8).log_softmax(-1)[:, :-1][written].gather(1, targets[:, None]).squeeze(1)
    assert torch.allclose(ours, theirs, atol=1e-4)
    parameters = dict(model.named_parameters())
    fused = torch.autograd.grad((theirs * weights).sum(), list(parameters.values()))
    expected = transformers_checkpoint.unfused(dict(zip(parameters, fused, strict=True)))
    for name, found in zip(masters, gradients, strict=True):
        assert (found - expected[name]).norm() <= 1e-4 * expected[name].norm(), name


# Lengths on both sides of the 16 positions that the scaled rotary embedding was "trained" on.
LENGTHS = (40, 1, 23, 16)


def our_logits(folder, tokens: Tensor, valid: Tensor, positions: Tensor) -> Tensor:
    checkpoint = find_checkpoint(folder)
    arch = checkpoint.architecture
    decoder = Decoder(arch, reference_formats(arch.num_layers))
    masters = {name: tensor.float() for name, tensor in checkpoint.source().items()}
    weights = load_policy(arch, stored_weights(masters, decoder.formats.stored_names(), decoder.formats.recipe.weights))
    hidden = decoder.hidden(weights, tokens, positions, FullContext.of(valid), scales=())
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
