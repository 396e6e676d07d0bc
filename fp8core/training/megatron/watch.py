"""What ends a process that waits in a collective for another one that is gone.

Over NCCL such a wait lasts until its timeout of half an hour, with the GPU busy, and no exception or signal handler of
Python reaches it. What is lost is what SIGKILL always loses: nothing that is finished.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from threading import Thread


class Watch:
    """Children of this process, and whether this one is in a call that needs all of them."""

    def __init__(self, processes: Sequence[BaseProcess], patience: float) -> None:
        """Watch them; `patience` is the seconds that a call may go on without one of them."""
        self._processes, self._patience = processes, patience
        self._numbers, self._call = count(1), 0
        if processes:
            Thread(target=self._end_a_stuck_call, name="watch of children", daemon=True).start()

    @contextmanager
    def call(self) -> Iterator[None]:
        """A call that all processes make together."""
        self._call = next(self._numbers)
        try:
            yield
        finally:
            self._call = 0

    def _end_a_stuck_call(self) -> None:
        wait([process.sentinel for process in self._processes])
        interrupted = self._call
        time.sleep(self._patience)
        if interrupted and self._call == interrupted:
            codes = [process.exitcode for process in self._processes if not process.is_alive()]
            said = f"a process of the Megatron trainer ended (exit code {codes}), and this one waits for it in vain"
            print(f"{said}: it ends too", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
