"""Output of a training whose worker is gone."""

import os
import subprocess
import sys

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
