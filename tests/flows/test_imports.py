"""What commands import, and what Python does beside it."""

import gc
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import fp8core.config
from flows.imports import uncollected

# None of these is imported to plan, and no command needs `transformers`.
LARGE = {"mlflow", "prefect", "pandas", "matplotlib", "transformers"}


@pytest.mark.parametrize(("command", "large"), [(["--help"], {"torch", *LARGE}), (["plan", "tiny"], LARGE)])
def test_a_short_command_imports_no_library_that_it_does_not_need(command, large):
    program = (
        "import contextlib, sys; from flows.cli import main\n"
        f"with contextlib.suppress(SystemExit), contextlib.redirect_stdout(sys.stderr): main({command})\n"
        f"print({large} & sys.modules.keys())"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout.strip() == "set()", found.stderr


def test_a_configuration_is_read_without_torch():
    names = sorted(f"fp8core.config.{file.stem}" for file in Path(fp8core.config.__path__[0]).glob("*.py"))
    loop = f"for name in {names}: import_module(name)"
    program = f"import sys\nfrom importlib import import_module\n{loop}\nprint('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout.strip() == "False"


def test_a_check_of_stored_tables_imports_no_pandas(whole_run):
    """It takes long, and pyarrow, which would import it in passing, makes nothing of Ctrl-C in it."""
    program = (
        "import sys; from pathlib import Path\n"
        "from fp8core.store.run_view import RunView\n"
        "from fp8core.run.verify import verify\n"
        "assert not list(verify(RunView.read(Path(sys.argv[1])), lambda more: None))\n"
        "print('pandas' in sys.modules)"
    )
    command = [sys.executable, "-c", program, str(whole_run.folder)]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout.strip() == "False"


def test_garbage_is_looked_for_again_after_a_failed_import():
    def fail():
        with uncollected():
            assert not gc.isenabled()
            import_module("flows.missing")

    before = gc.get_freeze_count()
    try:
        with pytest.raises(ImportError):
            fail()
        assert gc.isenabled()
        assert gc.get_freeze_count() > before
    finally:
        gc.unfreeze()
