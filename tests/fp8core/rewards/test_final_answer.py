import contextlib
import time

import pytest

from fp8core.rewards.final_answer import Unreadable, final_answer


@pytest.mark.parametrize("noise", ["$", " ", "\\", "{", r"\boxed{", "-", "\t$ ", "<a>"])
def test_a_long_text_costs_no_more_than_a_short_one(noise: str) -> None:
    begun = time.monotonic()
    for text in (noise * 100_000 + r"\boxed{18}", r"\boxed{18}" + noise * 100_000, r"\boxed{" + noise * 100_000):
        with contextlib.suppress(Unreadable):
            assert final_answer(text) == "18"
    assert time.monotonic() - begun < 2
