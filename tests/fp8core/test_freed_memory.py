import subprocess
import sys

import pytest

_PROGRAM = """
import resource, threading
from fp8core.freed_memory import keep_freed_memory
{call}
import torch

def faults():
    torch.set_num_threads(1)
    for repeats in (5, 20):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(repeats):
            tensors = [torch.ones(size << 20, dtype=torch.uint8) for size in (3, 20, 50)]
            del tensors
    found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

found = []
for thread in (threading.Thread(target=faults), threading.Thread(target=faults)):
    thread.start()
    thread.join()
print(found[-1])
"""


def _faults(call: str) -> int:
    """Pages that the system hands out for 20 times 73 MB in a thread, after the first five times."""
    command = [sys.executable, "-c", _PROGRAM.format(call=call)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="an option of glibc")
def test_memory_that_was_freed_is_used_again() -> None:
    """Not all of it: glibc cannot always put an aligned block where one of its size was."""
    given_back = _faults("")
    assert given_back > 20 * 40 * 256
    assert _faults("keep_freed_memory()") < given_back / 2
