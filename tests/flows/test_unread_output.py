"""Output that nobody reads, that is nowhere to be stored, or that has no such characters."""

import os
import subprocess
import sys

import pytest

# Prints with rich, which ends a process when nobody reads; then says on standard error how far it came.
PROGRAM = """
import sys
from rich.console import Console
from flows.orchestration import drop_unread_output
drop_unread_output()
Console().print("read")
sys.stdin.readline()
drop_unread_output()
Console().print("unread")
print("went on", file=sys.stderr)
"""


def test_a_process_goes_on_printing_when_nobody_reads_and_loses_only_what_is_not_read() -> None:
    with subprocess.Popen(
        [sys.executable, "-u", "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(os.environ),
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "read\n"
        process.stdout.close()
        process.stdin.write("\n")
        process.stdin.close()
        assert process.stderr.read() == "went on\n"
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("command", "shell", "code", "shown"),
    [
        ("config tiny --set data.template='{question}\N{CYRILLIC CAPITAL LETTER ZHE}'", "", 0, b""),
        ("config tiny", ">/dev/full", 1, b"fp8-grpo: standard output: No space left on device\n"),
        ("--help", ">/dev/full", 1, b"fp8-grpo: standard output: No space left on device\n"),
        ("config tiny", "| true", 0, b""),
        ("config tiny", ">&-", 0, b""),
    ],
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_cannot_be_written_is_one_line_or_none(command, shell, code, shown, unbuffered) -> None:
    line = f"{sys.executable} -m flows.cli {command} {shell}"
    variables = {**os.environ, "PYTHONIOENCODING": "latin-1", "PYTHONUNBUFFERED": unbuffered}
    ended = subprocess.run(line, shell=True, env=variables, capture_output=True, check=False)
    assert (ended.returncode, ended.stderr) == (code, shown)
    if not shell:
        assert b'data.template = "{question}\\u0416"' in ended.stdout
