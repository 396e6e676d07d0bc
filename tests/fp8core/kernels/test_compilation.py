"""Jobs that fill the folders of kernels, in processes of their own; here on a CPU, where nothing is compiled."""

import os
from pathlib import Path

import pytest

from fp8core.errors import UserError
from fp8core.kernels import cuda
from fp8core.kernels.compilation import Job, missing_jobs, run_jobs

VERSIONS = "torch 1, GPU"


def write(path, text):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)


def end(_):
    os._exit(9)


def jobs(folder, *works):
    return [Job(f"job {i}", "", folder / "kernels", work, arguments) for i, (work, *arguments) in enumerate(works)]


def test_jobs_are_done_once_with_the_same_versions_and_again_where_the_kernels_are_gone(tmp_path):
    planned = jobs(tmp_path, *((write, tmp_path / f"{i}", "done") for i in range(2)))
    heard = []
    run_jobs(planned, VERSIONS, lambda *done: heard.append(done))
    assert heard == [(0, 2), (1, 2), (2, 2)]
    assert [(tmp_path / f"{i}").read_text() for i in range(2)] == ["done"] * 2
    assert missing_jobs(planned, VERSIONS) == []
    assert missing_jobs(planned, "torch 2, GPU") == planned
    for mark in (tmp_path / "kernels" / "fp8-grpo").iterdir():
        mark.unlink()
    assert missing_jobs(planned, VERSIONS) == planned


@pytest.mark.parametrize(
    ("fails", "reason"), [((int, "x\ny"), "ValueError: invalid literal"), ((end, None), "a process was killed")]
)
def test_a_job_that_fails_is_named_and_is_not_done(tmp_path, fails, reason):
    (failing,) = jobs(tmp_path, fails)
    with pytest.raises(UserError, match=f"^compiling the kernels of job 0: {reason}") as found:
        run_jobs([failing], VERSIONS, lambda *_: None)
    assert "\n" not in str(found.value)
    assert missing_jobs([failing], VERSIONS) == [failing]


def test_machine_code_is_kept_by_source_options_and_compiler(tmp_path, monkeypatch):
    text, compiled = {"kernel": "one"}, []

    def compile_(name, options):
        compiled.append((text[name], *options))
        return repr(compiled[-1]).encode()

    monkeypatch.setattr(cuda, "source", lambda name: text[name])
    monkeypatch.setattr(cuda, "_compile", compile_)
    monkeypatch.setattr(cuda, "nvrtc_version", lambda: "13.0")
    folder = tmp_path / "kept"

    def image(*options):
        return cuda.kept_image(folder, "kernel", options)

    first = image("-DA=1", "-DB=2")
    assert image("-DA=1", "-DB=2") == first
    assert len(compiled) == 1
    others = [image("-DA=1-DB=2"), image("-DA=1")]
    text["kernel"] = "two"
    others.append(image("-DA=1", "-DB=2"))
    monkeypatch.setattr(cuda, "nvrtc_version", lambda: "13.1")
    others.append(image("-DA=1", "-DB=2"))
    assert len(compiled) == len(list(folder.iterdir())) == 5
    assert first not in others
    assert {path.name for path in tmp_path.iterdir()} == {"kept"}
