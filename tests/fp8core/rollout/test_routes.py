"""Recorded experts, as completions carry them."""

import numpy as np
import pytest
import torch

from fp8core.rollout.routes import routes_of


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.int32])
def test_routes_are_ascending_and_of_sparse_layers_alone(kind):
    chosen = np.array([[[3, 1], [0, 0], [200, 7]], [[0, 2], [0, 0], [1, 0]]], dtype=kind)
    found = routes_of("vLLM", chosen, (0, 2), 2)
    assert found.dtype == torch.int16
    assert found.tolist() == [[[1, 3], [7, 200]], [[0, 2], [0, 1]]]


def test_routes_that_were_not_recorded_are_no_routes():
    chosen = np.array([[[3, 1]], [[0, 0]]], dtype=np.uint8)
    with pytest.raises(RuntimeError, match="vLLM recorded one expert twice"):
        routes_of("vLLM", chosen, (0,), 2)
    with pytest.raises(RuntimeError, match="2 of 3 positions"):
        routes_of("vLLM", chosen, (0,), 3)
    with pytest.raises(RuntimeError, match="nothing of 2 positions"):
        routes_of("vLLM", None, (0,), 2)
