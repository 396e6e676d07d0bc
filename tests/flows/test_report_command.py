from pathlib import Path

import pytest

from flows.cli import main


def test_a_page_of_two_runs(whole_run, run_copy, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(whole_run.folder), str(run_copy.folder)]
    page = tmp_path / "page.html"
    assert main(["report", *runs, "--out", str(page)]) == 0
    assert capsys.readouterr().out.splitlines() == [str(page)]
    assert f"<title>{', '.join(runs)}</title>" in page.read_text()
