"""`fp8-grpo compile` as a person meets it, and the count of kernels that the steps of a run compile."""

from pathlib import Path

import pytest

from flows import cli
from flows.environment import kernel_folders
from flows.tracking.backlog import publish_step
from flows.tracking.metric_names import TIMED
from fp8core.kernels.compilation import KernelFolders
from fp8core.run.commit import step_metrics, stored_manifest
from fp8core.run.loop import Execution, train

MODEL = "model=Qwen/Qwen3-8B-Base"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["tiny"], 0, "nothing is compiled for a GPU"),
        (["qwen3-aligned", "--set", MODEL], 2, "qwen3-aligned compiles for a GPU, and there is none"),
        (["h200-small", "--set", "cluster.address=HEAD:6379"], 2, "cluster.address=HEAD:6379: compile on each node"),
        (["tiny", "--set", "steps=none"], 2, "steps"),
    ],
)
def test_one_line_says_what_is_compiled_or_why_nothing_can_be(capsys, arguments, code, said):
    assert cli.main(["compile", *arguments]) == code
    out, err = capsys.readouterr()
    (line,) = (err if code else out).splitlines()
    assert said in line
    assert not (out if code else err)


def test_kernels_are_looked_for_where_their_libraries_keep_them(monkeypatch, tmp_path):
    for name in ("DG_JIT_CACHE_DIR", "TRITON_HOME", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    own = tmp_path / ".cache" / "fp8-grpo" / "kernels"
    assert kernel_folders() == KernelFolders(tmp_path / ".deep_gemm", tmp_path / ".triton" / "cache", own)
    monkeypatch.setenv("TRITON_HOME", "/shared")
    monkeypatch.setenv("DG_JIT_CACHE_DIR", "/kept")
    assert kernel_folders() == KernelFolders(Path("/kept"), Path("/shared/.triton/cache"), own)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    assert str(kernel_folders().triton) == "/elsewhere"


class Compiling(Execution):
    """Another process compiles two kernels before step 6."""

    def __init__(self, folder):
        self._folder = folder

    def before_step(self, run, index):
        for name in ("A", "B") if index == 6 else ():
            (self._folder / name).mkdir(parents=True)


class Metrics:
    """Receives what MLflow would."""

    def log_step(self, step, metrics, timestamp, tags):
        self.of_step = metrics

    def log_artifact(self, *_):
        pass


def test_kernels_of_a_step_are_counted_beside_what_a_replay_compares(run_copy, tmp_path):
    folders = KernelFolders(tmp_path / "deep_gemm", tmp_path / "triton", tmp_path / "own")
    shown = {}
    with run_copy.opened(steps=7) as run:
        run.kernels = folders
        train(run, Compiling(folders.triton))
        for index in (4, 5, 6, 7):
            received = Metrics()
            publish_step(run, received, index)
            shown[index] = received.of_step.get("detail/compile/kernels")
            assert not any("compile" in name for name in step_metrics(run, index))
            assert "compile" not in stored_manifest(run, index).model_dump_json()
    assert shown == {4: None, 5: 0, 6: 2, 7: 0}
    assert "detail/compile/kernels".startswith(TIMED)
