"""Layers sharded over processes by FSDP2: what a trainer over several GPUs wraps (`fully_shard`)."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard

from fp8core.numerics.attention import Bf16Attention
from fp8core.numerics.block_codes import FiniteFlag
from fp8core.numerics.packed_attention import Bf16PackedAttention, DevicePack
from fp8core.numerics.packed_sequences import PackedSequences
from fp8core.training.torch.blocks import Fp8Blocks
from fp8core.training.torch.decoder import PackedDecoder

CPU = torch.device("cpu")
RANKS = 2


def decoder(arch) -> PackedDecoder:
    torch.manual_seed(0)
    built = PackedDecoder(arch, [Fp8Blocks("pow2", FiniteFlag(CPU))] * arch.num_layers, CPU, recompute=False)
    for parameter in built.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return built


def loss_of(built: PackedDecoder, rank: int) -> torch.Tensor:
    sequences = PackedSequences.of([20 + rank, 30])
    tokens = torch.arange(sequences.tokens) % built.arch.vocab_size
    attention = Bf16PackedAttention(Bf16Attention())
    hidden = built(tokens, DevicePack.of(sequences, CPU), attention, None)[sequences.valid]
    return (hidden.float() * torch.linspace(-1, 1, hidden.shape[-1])).sum()


def _train(rank: int, port: int, arch, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    built = decoder(arch)
    for layer in built.packed_layers():
        fully_shard(layer)
    fully_shard(built)
    loss_of(built, rank).backward()
    gradients = {name: parameter.grad.full_tensor() for name, parameter in built.named_parameters()}
    if rank == 0:
        torch.save(gradients, folder / "gradients.pt")
    # Neither closes a connection that the other still uses. And the interpreter is not taken down: threads of the
    # process group may be alive then, for which C++ ends the process ("terminate called without an active exception").
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


@pytest.mark.slow
def test_gradients_of_sharded_layers_are_those_of_whole_ones(architecture, tmp_path, free_port) -> None:
    arch = architecture(tie_embeddings=True)
    mp.spawn(_train, (free_port(), arch, tmp_path), nprocs=RANKS)
    found = torch.load(tmp_path / "gradients.pt")

    whole = decoder(arch)
    for rank in range(RANKS):
        loss_of(whole, rank).backward()
    for name, parameter in whole.named_parameters():
        # FSDP takes the mean over ranks.
        assert torch.allclose(found[name], parameter.grad / RANKS, rtol=1e-5, atol=1e-6), name
