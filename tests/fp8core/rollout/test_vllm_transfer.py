"""Tensors through a file; those of a GPU are tested with vLLM itself (tests/vllm)."""

from pathlib import Path

import torch

from fp8core.rollout.vllm_transfer import parcel, unpack


def test_a_file_brings_every_bit_and_goes():
    tensors = {
        "codes": torch.arange(64, dtype=torch.uint8).view(torch.float8_e4m3fn).view(8, 8),
        "scales": torch.tensor([[0.5, -0.0], [float("inf"), 3.0]]),
        "norm": torch.randn(5).bfloat16().requires_grad_(),
        "turned": torch.randn(3, 4).t(),
    }
    with parcel(tensors) as sent:
        received = unpack(sent, torch.device("cpu"))
    assert not Path(sent["file"]).exists()
    assert received.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (received[name].dtype, received[name].shape) == (tensor.dtype, tensor.shape)
        assert received[name].contiguous().view(torch.uint8).equal(tensor.detach().contiguous().view(torch.uint8))


def test_a_file_is_read_tensor_by_tensor():
    """An engine that is given a policy holds one tensor of it beside its own."""
    with parcel({"codes": torch.ones(4, 4), "norm": torch.ones(3)}) as sent:
        received = unpack(sent, torch.device("cpu"))
        first, second = received["codes"], received["codes"]
    assert (len(received), set(received)) == (2, {"codes", "norm"})
    assert first is not second
