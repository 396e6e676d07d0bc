"""Finding a step by its import path."""

from pathlib import Path

import pytest

from fp8core.config.steps import StepSpec, import_spec, import_step
from fp8core.errors import UserError

MODULE = """
from fp8core.config.steps import StepSpec

def score(): return 3
score.spec = StepSpec("score", inputs={}, outputs={"rewards": "rewards"})

def plain(): return 3
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_a_step_of_the_users_own_is_found(modules: Path) -> None:
    (modules / "own_steps_found.py").write_text(MODULE)
    assert import_step("own_steps_found:score")() == 3
    assert import_spec("own_steps_found:score").outputs == {"rewards": "rewards"}


@pytest.mark.parametrize(
    ("uses", "source", "message"),
    [
        ("own_absent:score", None, "there is no module own_absent"),
        ("own_absent.deeper:score", None, "there is no module own_absent"),
        ("own_a:absent", MODULE, "module own_a has no absent"),
        ("own_b:plain", MODULE, "plain is not a step"),
        ("own_c:score", "import absent_library\n", "own_c imports absent_library, which is not installed"),
        ("own_d:score", "from json import absent_name\n", "own_d cannot be imported: cannot import name"),
        ("own_e:score", "def (\n", "own_e.py:1: invalid syntax"),
        ("own_f:score", "ready = True\nlimit = 1 / 0\n", "own_f.py:2: ZeroDivisionError: division by zero"),
        ("own_g:score", "raise ValueError('no\\nuse')\n", "own_g.py:1: ValueError: no"),
        ("own_h:score", "raise SystemExit('a script')\n", "own_h.py:1: SystemExit: a script"),
    ],
)
def test_what_is_no_step_is_refused_with_the_reason(modules: Path, uses: str, source: str | None, message: str) -> None:
    if source is not None:
        (modules / f"{uses.partition(':')[0]}.py").write_text(source)
    with pytest.raises(UserError) as caught:
        import_spec(uses)
    assert str(caught.value).startswith(f"uses {uses}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_port_is_required_or_optional() -> None:
    spec = StepSpec("s", inputs={"a": "x"}, optional_inputs={"b": "y"}, outputs={})
    assert spec.input_kinds == {"a": "x", "b": "y"}
    with pytest.raises(AssertionError, match="both required and optional"):
        StepSpec("s", inputs={"a": "x"}, optional_inputs={"a": "x"}, outputs={})
