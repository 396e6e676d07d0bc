import pytest
import torch

kernels = pytest.importorskip("fp8core.numerics.triton_columns", reason="needs Triton", exc_type=ImportError)


@pytest.mark.parametrize("shape", [(1, 40), (2 * kernels._ROWS + 3, kernels._COLUMNS + 1)], ids=str)
def test_every_row_of_every_column_is_added(shape: tuple[int, int]) -> None:
    # Integers: sums of any order are equal.
    x = torch.randint(-1000, 1000, shape, generator=torch.Generator().manual_seed(0)).float()
    assert torch.equal(kernels.column_sums(x), x.sum(0))
