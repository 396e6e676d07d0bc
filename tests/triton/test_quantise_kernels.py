import pytest
import torch

from fp8core.numerics.e4m3 import encode, quantise_columns, quantise_rows, quantise_tiles

kernels = pytest.importorskip("fp8core.numerics.triton_quantise", reason="needs Triton", exc_type=ImportError)


@pytest.mark.parametrize("rule", ["pow2", "fp32"])
@pytest.mark.parametrize("shape", [(130, 5), (37, 200)], ids=str)
def test_codes_are_those_of_the_reference(draw, assert_same_codes, not_finite, shape, rule: str) -> None:
    x = draw(*shape, seed=1)
    wide = x.float()

    def reference(quantise):
        grid, scales = quantise(wide, rule)
        return encode(grid), scales

    rows, columns = kernels.quantise_rows_and_columns(x, rule, not_finite)
    assert_same_codes(kernels.quantise_rows(x, rule, not_finite), reference(quantise_rows))
    assert_same_codes(rows, reference(quantise_rows))
    assert_same_codes(columns, reference(quantise_columns))
    assert_same_codes(kernels.quantise_tiles(x, rule, not_finite), reference(quantise_tiles))
    assert not not_finite.item()


@pytest.mark.parametrize("name", ["quantise_rows", "quantise_rows_and_columns", "quantise_tiles"])
@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_the_flag_is_set_by_nan_and_infinity(not_finite, name: str, value: float) -> None:
    x = torch.ones(9, 150).bfloat16()
    x[8, 149] = value
    getattr(kernels, name)(x, "pow2", not_finite)
    assert not_finite.item() == 1
