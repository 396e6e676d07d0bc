"""Losses of the user's own: what they see, what becomes of their terms, and what a broken one is told."""

import pytest
import torch

from fp8core.config.loss import LossConfig
from fp8core.config.training import CorrectionConfig
from fp8core.errors import UserError
from fp8core.rl.losses import AGGREGATIONS, ClipRange, Denominator, LossInputs, clipped_surrogate, token_mean
from fp8core.rl.objective import Objective
from fp8core.rl.user_loss import load_loss, shared_loss

HEADER = """
import torch
from pydantic import Field
from fp8core.config.section import Section
from fp8core.rl.user_loss import policy_loss

class Options(Section):
    slack: float = Field(0.0, ge=0, le=1, description="Wider clip.")

"""
SURROGATE = """
@policy_loss(options=Options)
def loss(tokens, options):
    bounded = tokens.ratio.clamp(1 - tokens.clip.low - options.slack, 1 + tokens.clip.high + options.slack)
    return torch.maximum(-tokens.advantages * tokens.ratio, -tokens.advantages * bounded)
"""


@pytest.fixture
def written(tmp_path):
    """written(code): the import path of `loss` in a file with the header above."""

    def write(code, name="mine.py"):
        (tmp_path / name).write_text(HEADER + code)
        return f"{tmp_path / name}:loss"

    return write


def inputs(seed=0):
    g = torch.Generator().manual_seed(seed)
    old = -torch.rand(4, 6, generator=g, dtype=torch.float64)
    mask = torch.rand(4, 6, generator=g) < 0.7
    return LossInputs(
        current=(old + 0.4 * torch.randn(4, 6, generator=g)).masked_fill(~mask, torch.nan).requires_grad_(),
        old=old,
        advantages=torch.randn(4, generator=g),
        loss_mask=mask,
        denominator=Denominator.of(mask),
        weights=0.5 + torch.rand(4, 6, generator=g),
    )


@pytest.mark.parametrize("aggregate", AGGREGATIONS.values())
def test_terms_are_weighted_and_aggregated_like_ours(written, aggregate):
    given = inputs()
    for slack in (0.0, 0.3):
        mine = load_loss(written(SURROGATE), {"slack": slack})(given, ClipRange(low=0.2, high=0.28), aggregate)
        ours = clipped_surrogate(given, ClipRange(low=0.2 + slack, high=0.28 + slack), aggregate)
        assert mine.loss.item() == pytest.approx(ours.loss.item(), rel=1e-12)
        assert mine.ratio_mean.item() == pytest.approx(ours.ratio_mean.item(), rel=1e-12)
        gradients = [torch.autograd.grad(loss.loss, given.current)[0] for loss in (mine, ours)]
        torch.testing.assert_close(*gradients, rtol=1e-12, atol=0)
        assert not gradients[0][~given.loss_mask].any()


BROKEN = {
    "raises": ("return tokens.absent", r"mine\.py:\d+: AttributeError: 'Tokens' object has no attribute 'absent'"),
    "nothing": ("return None", "returned NoneType, not floating-point terms"),
    "a mean": ("return tokens.current.mean()", r"returned torch.float64 \[\], not floating-point terms \[2, 3\]"),
    "not a number": ("return tokens.current / 0 * 0", "returned nan for token 0 of row 0"),
    "truth": ("return tokens.active_mask", r"returned torch.bool \[2, 3\], not floating-point"),
    "constant": ("return tokens.advantages", "nothing would be learnt"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_function_is_one_line_before_any_work(written, name):
    body, reason = BROKEN[name]
    path = written(f"@policy_loss(options=Options)\ndef loss(tokens, options):\n    {body}\n")
    with pytest.raises(UserError, match=f"loss.policy={path}: .*{reason}") as raised:
        Objective(LossConfig(policy=path), CorrectionConfig())
    assert "\n" not in str(raised.value)


def test_a_function_that_breaks_later_names_the_token(written):
    body = "return tokens.current + torch.where(tokens.current < -50, torch.nan, 0.0)"
    loss = load_loss(written(f"@policy_loss()\ndef loss(tokens, options):\n    {body}\n"), {})
    given = inputs()
    row, token = given.loss_mask.nonzero()[3].tolist()
    with torch.no_grad():
        given.current[row, token] = -60.0
    with pytest.raises(UserError, match=f"returned nan for token {token} of row {row} of its micro-batch"):
        loss(given, ClipRange(low=0.2, high=0.2), token_mean)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("def loss(tokens, options): return tokens.current\n", "loss is not declared with @policy_loss"),
        ("def other(tokens, options): return tokens.current\n", "has no function loss"),
        ("1 / 0\n", "cannot be imported: ZeroDivisionError: division by zero"),
        ("@policy_loss()\ndef loss(tokens): return tokens.current\n", r"TypeError: loss\(\) takes 1 positional"),
    ],
)
def test_what_is_no_loss_is_refused(written, code, reason):
    with pytest.raises(UserError, match=reason) as raised:
        load_loss(written(code), {})
    assert "\n" not in str(raised.value)


def test_options_are_validated(written):
    with pytest.raises(UserError, match=r"^loss\.options\.slack: must be less than or equal to 1, got 2$"):
        load_loss(written(SURROGATE), {"slack": 2})
    with pytest.raises(UserError, match=r"^loss\.options\.slak: unknown key; did you mean slack\?$"):
        load_loss(written(SURROGATE), {"slak": 0.1})


def test_a_process_with_another_folder_finds_the_file(written, tmp_path, monkeypatch):
    path = written(SURROGATE)
    monkeypatch.chdir(tmp_path)
    shared = shared_loss(LossConfig(policy="mine.py:loss", options={"slack": 0.5}))
    assert (shared.policy, shared.options) == (path, {"slack": 0.5})
    assert shared_loss(LossConfig()) == LossConfig()
