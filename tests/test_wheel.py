"""A user installs a wheel, without a checkout: whatever a training needs must be in it."""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
SMALLER = ("steps=1", "warm_start.steps=3", "warm_start.batch_size=16", "evaluation.prompts=4")
# Packages of extras, which neither a training nor one of its dependencies needs.
EXTRAS = ("accelerate", "datasets", "gguf", "math_verify", "megatron", "mkdocs", "pytest", "ray", "tensorboard")
# Calls the console script as if none of them were installed.
WITHOUT_EXTRAS = """\
import runpy, sys
sys.modules.update(dict.fromkeys({extras}))
sys.argv[0] = {script!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command `fp8-grpo` of a wheel that is built and installed here, beside the packages of this environment."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "--quiet")
    build = ("wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", folder, REPOSITORY)
    subprocess.run([*pip, *build], check=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", folder / "installed", wheel], check=True)
    return folder / "installed" / "bin" / "fp8-grpo"


@pytest.fixture
def call(script: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the command in an empty folder. This checkout, which a .pth file puts on the path, cannot be imported."""
    path = os.pathsep.join((str(script.parents[1]), sysconfig.get_path("purelib")))
    # Without the servers of other tests.
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "MLFLOW_"))}
    environment |= {"PYTHONPATH": path, "HOME": str(tmp_path)}
    code = WITHOUT_EXTRAS.format(extras=EXTRAS, script=str(script))

    def fp8_grpo(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-S", "-P", "-c", code, *words]
        return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)

    return fp8_grpo


def test_a_training_needs_the_wheel_and_no_extra(
    call: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    (tmp_path / "mine.yaml").write_text("base: tiny\nname: mine\n")
    settings = [word for setting in SMALLER for word in ("--set", setting)]
    run = call("run", "mine.yaml", "--set", "run=first", *settings)
    assert run.returncode == 0, run.stderr
    assert ["report", f"{tmp_path}/runs/first/report.html"] in [line.split() for line in run.stdout.splitlines()]
    assert (tmp_path / "runs" / "first" / "report.html").stat().st_size > 100_000
    refused = call("run", "tiny", "--set", "reward.verifier=math-verify", *settings)
    assert (refused.returncode, refused.stderr) == (
        2,
        "fp8-grpo: reward.verifier=math-verify: it is not installed (pip install 'fp8-grpo[math]')\n",
    )
