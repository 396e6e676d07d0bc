from pathlib import Path

import pytest

from flows.cli import main


def test_a_page_of_two_runs(whole_run, run_copy, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(whole_run.folder), str(run_copy.folder)]
    page = tmp_path / "page.html"
    assert main(["report", *runs, "--out", str(page)]) == 0
    assert capsys.readouterr().out.splitlines() == [str(page)]
    names = ["/".join(Path(run).parts[-2:]) for run in runs]
    assert f"<title>{', '.join(names)}</title>" in page.read_text()
    assert main(["report", runs[0], runs[0], "--out", str(page)]) == 2
    assert "named twice" in capsys.readouterr().err


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "gone")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no run (no run.json in" in line
    assert main(["report", "x", "--out", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"fp8-grpo: --out {tmp_path}: cannot be written")
