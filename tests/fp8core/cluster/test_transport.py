"""Weights from one process to others, in parts that a receiver with little memory holds."""

import socket
import threading
from datetime import timedelta

import pytest
import torch
from torch import distributed
from torch.distributed import TCPStore

from fp8core.cluster import transport
from fp8core.cluster.transport import GroupRanks, Link
from fp8core.errors import UserError
from fp8core.rollout.shared_weights import specs_of


@pytest.fixture
def links():
    """A sender and two receivers."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ends: dict[int, Link] = {}

    def meet(process: int) -> None:
        ends[process] = Link("127.0.0.1", store.port, "weights", "gloo", process, 3)

    threads = [threading.Thread(target=meet, args=(process,)) for process in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ends[0], [ends[1], ends[2]]


def test_a_port_that_is_closed_between_nodes_is_refused_soon_by_its_address(monkeypatch):
    monkeypatch.setattr(transport, "_CONNECT", timedelta(seconds=1))
    # A test of Megatron may have left this process a group.
    before = distributed.is_initialized()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(UserError, match=rf"^cluster: \S+ cannot reach 127\.0\.0\.1:{port}; "):
        GroupRanks("127.0.0.1", port, 1, 2)
    assert distributed.is_initialized() == before


@pytest.fixture
def small_parts(monkeypatch):
    """Pieces of 100 bytes, and parts of 300."""
    monkeypatch.setattr(transport, "_PIECE_BYTES", 100)
    monkeypatch.setattr(transport, "RECEIVED_BYTES", 300)


@pytest.mark.usefixtures("small_parts")
def test_every_receiver_has_all_bytes_and_never_many_of_them(links):
    generator = torch.Generator().manual_seed(0)
    sizes = [(7, 3), (64,), (1,), (40, 12), (5, 5), (3,), (2, 2, 30), (90,)]
    tensors = {f"{i}": torch.randn(size, generator=generator).bfloat16() for i, size in enumerate(sizes)}
    tensors["codes"] = torch.randint(0, 255, (33, 3), generator=generator).to(torch.uint8).view(torch.float8_e4m3fn)
    # In one piece: elements of 4 bytes behind an odd number of bytes.
    tensors |= {"odd": torch.arange(3, dtype=torch.uint8), "wide": torch.randn(2, generator=generator)}
    sender, receivers = links
    found: list[list[dict[str, torch.Tensor]]] = [[], []]

    def receive(i: int) -> None:
        for part in receivers[i].receive(specs_of(tensors)):
            found[i].append({name: tensor.clone() for name, tensor in part.items()})

    threads = [threading.Thread(target=receive, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    sender.send(tensors)
    for thread in threads:
        thread.join()
    for parts in found:
        assert [name for part in parts for name in part] == list(tensors)
        for name, tensor in ((name, tensor) for part in parts for name, tensor in part.items()):
            assert (tensor.dtype, tensor.shape) == (tensors[name].dtype, tensors[name].shape)
            assert torch.equal(tensor.view(torch.uint8), tensors[name].view(torch.uint8))
        held = [sum(tensor.nbytes for tensor in part.values()) for part in parts]
        assert all(size <= 300 for size, part in zip(held, parts, strict=True) if len(part) > 1)
        assert len(parts) > 3
