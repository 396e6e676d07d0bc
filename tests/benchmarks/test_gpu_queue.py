"""Queues of commands side by side: what each of them sees, what ends a command, and lines that come later."""

import json

import psutil
import pytest

from benchmarks.gpu_queue import RESULT, main, read_lines


def rows_of(out):
    return [json.loads(line) for line in (out / RESULT).read_text().splitlines()]


def test_queues_run_their_lines_in_order_on_their_gpus(tmp_path):
    said = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['PREFECT_HOME'])"
    for gpus in ("0", "1,2"):
        (tmp_path / f"{gpus}.txt").write_text(f'20 python -c "{said}"\n20 python -c "print(2)" {{out}} {{gpus}}\n')
    out = tmp_path / "out"
    assert main(["--out", str(out), *(str(tmp_path / f"{gpus}.txt") for gpus in ("0", "1,2"))]) == 0
    for gpus in ("0", "1,2"):
        assert (out / gpus / "1.log").read_text() == f"{gpus} {out / gpus / 'prefect'}\n"
        first, second = (row for row in rows_of(out) if row["gpus"] == gpus)
        assert (first["code"], second["code"]) == (0, 0)
        assert second["command"].endswith(f"{out} {gpus}")


def test_a_command_that_takes_too_long_is_ended_with_what_it_started_and_the_next_one_runs(tmp_path):
    starts = "import subprocess; apart = subprocess.Popen(['sleep', '600'], start_new_session=True); "
    starts += "print(apart.pid, flush=True); subprocess.run(['sleep', '600'])"
    (tmp_path / "0.txt").write_text(f'2 python -c "{starts}"\n20 python -c "pass"\n')
    assert main(["--out", str(tmp_path / "out"), str(tmp_path / "0.txt")]) == 1
    slow, next_ = rows_of(tmp_path / "out")
    assert slow["code"] < 0
    assert slow["seconds"] < 15
    apart = int((tmp_path / "out" / "0" / "1.log").read_text())
    assert not psutil.pid_exists(apart) or psutil.Process(apart).status() == psutil.STATUS_ZOMBIE
    assert next_["code"] == 0


def test_a_line_that_is_added_while_it_runs_is_run(tmp_path):
    queue = tmp_path / "0.txt"
    add = f"open({str(queue)!r}, 'a').write('20 python -c pass')"
    queue.write_text(f'20 python -c "{add}"\n')
    assert main(["--out", str(tmp_path / "out"), str(queue)]) == 0
    assert len(rows_of(tmp_path / "out")) == 2


@pytest.mark.parametrize("line", ["python -m x", "20", "20s python -m x"])
def test_a_line_without_seconds_or_command_is_refused_with_its_place(tmp_path, line, capsys):
    (tmp_path / "0.txt").write_text(f"5 python -c pass\n{line}\n")
    with pytest.raises(ValueError, match=r"0\.txt:2: a line is seconds and a command"):
        read_lines(tmp_path / "0.txt", tmp_path, "0")
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path / "out"), str(tmp_path / "0.txt")])
    assert "0.txt:2" in capsys.readouterr().err
    assert not (tmp_path / "out" / RESULT).exists()
