"""The path of a completion from its prompt to the update stays short (docs/concepts/iteration.md)."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "docs" / "completion_path.py"


@pytest.fixture(scope="module")
def counter() -> ModuleType:
    spec = importlib.util.spec_from_file_location("completion_path", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("name", "files", "types"), [("tiny", 23, 9), ("tiny-tools", 25, 16)])
def test_a_completion_passes_few_files_and_types(counter: ModuleType, name: str, files: int, types: int) -> None:
    """With tools a type more than docs/concepts/iteration.md says where an environment answers late."""
    path = counter.completion_path(name)
    shown = "\n".join([*path.functions, *path.types])
    # The ends of the path, so that a short one is not a search that saw nothing.
    assert "fp8core/run/rollouts.py:prompt_table" in path.functions
    assert "fp8core/rl/losses.py:clipped_surrogate" in path.functions
    assert len(path.files) <= files, shown
    assert len(path.types) <= types, shown
