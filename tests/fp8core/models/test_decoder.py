"""In FP32 the decoder computes what transformers computes from the same folder."""

import pytest
import torch
from torch import Tensor

from fp8core.config.precision import PrecisionContract
from fp8core.models.checkpoint import find_checkpoint
from fp8core.models.decoder import Decoder, FullContext
from fp8core.models.weights import load_policy, reference_formats, rollout_formats, stored_weights
from fp8core.numerics.kv_scales import LayerScales
from fp8core.numerics.logprobs import token_logprobs
from fp8core.numerics.recipe import RECIPES
from fp8core.rl.batch import TokenBatch

SCALES = [LayerScales(q=2**-6, k=2**-6, v=2**-5)] * 2
CONTRACTS = {name: PrecisionContract(scale_rule=name) for name in RECIPES}


@pytest.fixture
def hidden_of(architecture, masters_of):
    """(contract, tokens, valid) to hidden states of one random policy."""
    arch = architecture()

    def hidden(contract: PrecisionContract, tokens: Tensor, valid: Tensor, observe=None) -> Tensor:
        decoder = Decoder(arch, rollout_formats(contract, 2))
        stored = stored_weights(masters_of(arch), decoder.formats.stored_names(), contract.recipe.weights)
        positions = (valid.cumsum(1) - 1).clamp(min=0)
        return decoder.hidden(load_policy(arch, stored), tokens, positions, FullContext.of(valid), SCALES, observe)

    return hidden


def random_tokens(*shape, seed=0):
    return torch.randint(40, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("contract", CONTRACTS)
def test_later_tokens_and_other_rows_change_nothing(hidden_of, contract):
    tokens, valid = random_tokens(3, 9), torch.ones(3, 9, dtype=torch.bool)
    whole = hidden_of(CONTRACTS[contract], tokens, valid)
    changed = tokens.clone()
    changed[:, 6:], changed[1] = random_tokens(3, 3, seed=1), random_tokens(9, seed=2)
    after = hidden_of(CONTRACTS[contract], changed, valid)
    assert torch.equal(whole[[0, 2], :6], after[[0, 2], :6])
    assert not torch.equal(whole[[0, 2], 6:], after[[0, 2], 6:])
    assert torch.equal(hidden_of(CONTRACTS[contract], tokens[:1, :4], valid[:1, :4]), whole[:1, :4])


@pytest.mark.parametrize("contract", CONTRACTS)
def test_padding_on_either_side_changes_nothing(hidden_of, contract):
    tokens = random_tokens(2, 7)
    whole = hidden_of(CONTRACTS[contract], tokens, torch.ones(2, 7, dtype=torch.bool))
    filler, padding = random_tokens(2, 5, seed=3), torch.zeros(2, 5, dtype=torch.bool)
    left = hidden_of(
        CONTRACTS[contract], torch.cat([filler, tokens], 1), torch.cat([padding, ~padding, ~padding[:, :2]], 1)
    )
    right = hidden_of(
        CONTRACTS[contract], torch.cat([tokens, filler], 1), torch.cat([~padding, ~padding[:, :2], padding], 1)
    )
    assert torch.equal(left[:, 5:], whole)
    assert torch.equal(right[:, :7], whole)


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
