import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8core.errors import UserError
from fp8core.rl.rejection import FILTERS, Filter, Veto, parse_filters

GOLDEN_D = [0.1, -1.5, 0.8, -10.0, 0.3]
ROWS = st.lists(st.lists(st.tuples(st.floats(-25, 25), st.booleans()), min_size=3, max_size=3), min_size=1, max_size=5)


def build(name, low=0.5, high=2.0):
    return Filter(name=name, low=low, high=high) if name.endswith("_k1") else Filter(name=name, high=high)


def passing(test, values, mask=None):
    d = torch.tensor([values], dtype=torch.float64)
    mask = torch.ones_like(d, dtype=torch.bool) if mask is None else torch.tensor([mask])
    return test.passes(d, mask)[0].tolist()


def slow_passes(name, row, low, high):
    """Independent: one row of (d, unmasked) pairs, the band on the ratio itself."""
    level, kind = name.rsplit("_", 1)
    dc = [max(-20.0, min(20.0, d)) for d, _ in row]
    unmasked = [x for x, (_, m) in zip(dc, row, strict=True) if m]

    def divergence(x):
        return {"k1": x, "k2": x * x / 2, "k3": math.exp(x) - 1 - x}[kind]

    def within(x):
        return low <= math.exp(x) <= high if kind == "k1" else x <= high

    if level == "token":
        return [m and within(divergence(x)) for x, (_, m) in zip(dc, row, strict=True)]
    if not unmasked:
        return [False] * len(row)
    values = [divergence(x) for x in unmasked]
    total = {"seq_sum": math.fsum(values), "seq_mean": math.fsum(values) / len(values), "seq_max": max(values)}[level]
    return [m and within(total) for _, m in row]


def test_there_are_eleven_filters():
    levels = ("token", "seq_sum", "seq_mean")
    assert set(FILTERS) == {f"{level}_k{i}" for level in levels for i in (1, 2, 3)} | {"seq_max_k2", "seq_max_k3"}
    assert len(FILTERS) == 11


@pytest.mark.parametrize("name", FILTERS)
@settings(max_examples=40)
@given(rows=ROWS)
def test_every_filter_equals_an_independent_loop(name, rows):
    d = torch.tensor([[x for x, _ in row] for row in rows], dtype=torch.float64)
    mask = torch.tensor([[m for _, m in row] for row in rows])
    kept = build(name).passes(d, mask).tolist()
    assert kept == [slow_passes(name, row, 0.5, 2.0) for row in rows]


@pytest.mark.parametrize("name", FILTERS)
def test_agreement_passes_and_empty_rows_stay_empty(name):
    test = build(name, low=0.999, high=1.001)
    assert passing(test, [0.0, 0.0], [True, False]) == [True, False]
    assert passing(test, [math.inf, -5.0], [False, False]) == [False, False]


def test_golden_token_band():
    assert passing(build("token_k1"), GOLDEN_D) == [True, False, False, False, True]


def test_the_band_is_on_rho_and_not_on_its_inverse():
    """Band 0.6_1.4: rho = 1.5 is out and rho = 0.7 is in; on 1/rho, as verl's code has it, the reverse."""
    for name in ("token_k1", "seq_sum_k1", "seq_mean_k1"):
        band = Filter(name=name, low=0.6, high=1.4)
        assert passing(band, [math.log(1.5)]) == [False]
        assert passing(band, [math.log(0.7)]) == [True]
    inverse = -math.log(1.5)
    assert math.log(0.6) <= inverse <= math.log(1.4), "the vector tells the two readings apart"


def test_reciprocal_bands_have_no_sign_trap():
    band = Filter(name="token_k1", low=0.5, high=2.0)
    for ratio in (0.3, 0.6, 1.9, 2.5):
        assert passing(band, [math.log(ratio)]) == passing(band, [-math.log(ratio)])


def test_length_trap():
    d = [math.log(1.1)] * 100
    assert not any(passing(build("seq_sum_k1"), d))
    assert not any(passing(build("seq_mean_k1", 0.999, 1.001), d))
    assert all(passing(build("seq_mean_k1", 0.9, 1.2), d))
    assert all(passing(build("seq_sum_k1"), d[:5]))


def test_row_filters_drop_the_whole_row_and_ignore_masked_tokens():
    guard = Filter(name="seq_max_k2", high=2.5)
    assert passing(guard, [0.1, -3.0, 0.2]) == [False, False, False]
    assert passing(guard, [0.1, -3.0, 0.2], [True, False, True]) == [True, False, True]


def test_veto_looks_at_every_unmasked_token_unclamped():
    veto = Veto(low=1e-4)
    d = torch.tensor([GOLDEN_D, [-9.2, 0.0, 5.0, 50.0, 0.0]], dtype=torch.float64)
    mask = torch.ones_like(d, dtype=torch.bool)
    assert veto.catastrophic(d, mask).any(dim=1).tolist() == [True, False]
    mask[0, 3] = False
    assert not veto.catastrophic(d, mask).any()
    assert Veto(low=1e-12).catastrophic(torch.tensor([[-30.0]]), torch.tensor([[True]])).item()
    assert Veto(low=1e-4, high=100.0).catastrophic(d, mask).any(dim=1).tolist() == [False, True]


@settings(max_examples=60)
@given(st.lists(st.floats(-19, 19), min_size=1, max_size=6))
def test_two_sided_veto_is_seq_max_k2(values):
    tau = 1e-4
    bound = math.log(tau) ** 2 / 2
    assert bound == pytest.approx(42.4, abs=0.02)
    if any(abs(abs(x) - math.log(1 / tau)) < 1e-9 for x in values):
        return
    d = torch.tensor([values], dtype=torch.float64)
    mask = torch.ones_like(d, dtype=torch.bool)
    vetoed = bool(Veto(low=tau, high=1 / tau).catastrophic(d, mask).any())
    assert vetoed == (not all(passing(Filter(name="seq_max_k2", high=bound), values)))


def test_the_largest_k2_is_that_of_the_clamped_exponent():
    assert all(passing(Filter(name="seq_max_k2", high=200.0), [-1e6]))
    assert not any(passing(Filter(name="seq_max_k2", high=199.9), [-1e6]))


def test_parsing_verl_s_notation():
    assert parse_filters("seq_mean_k1, seq_max_k2", "0.999_1.001, 2.5") == (
        Filter(name="seq_mean_k1", low=0.999, high=1.001),
        Filter(name="seq_max_k2", high=2.5),
    )
    assert parse_filters("token_k2,seq_mean_k3", "2") == (
        Filter(name="token_k2", high=2.0),
        Filter(name="seq_mean_k3", high=2.0),
    )
    assert parse_filters("token_k1", "4") == (Filter(name="token_k1", low=0.25, high=4.0),)


@pytest.mark.parametrize(
    ("names", "bounds", "message"),
    [
        ("seq_max_k1", "0.5_2", "'seq_max_k1' is not one of token_k1"),
        ("token_k1,token_k2,token_k3", "1,2", "2 bounds .* for 3 rejection filters"),
        ("token_k1", "0.5", "low=2.0, high=0.5"),
        ("token_k1", "2_0.5", "low=2.0, high=0.5"),
        ("token_k1", "0_2", "needs a band"),
        ("token_k2", "-1", "high=-1.0"),
        ("token_k2", "0.5_2", "takes one upper bound"),
        ("token_k1", "0.5_1_2", "more than two numbers"),
        ("token_k1", "a_b", "neither a number nor low_high"),
        ("token_k3", "nan", "high=nan"),
    ],
)
def test_bad_notation_is_refused(names, bounds, message):
    with pytest.raises(UserError, match=message):
        parse_filters(names, bounds)


def test_bad_vetoes_are_refused():
    with pytest.raises(UserError, match="veto bounds low=0"):
        Veto(low=0.0)
