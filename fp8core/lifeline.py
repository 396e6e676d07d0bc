"""Processes of vLLM and of Megatron end with the training that started them, however that went: by SIGKILL too.

Left alone they wait for requests that nobody sends any more, or in a collective for one that is gone, and keep the
memory of their GPU. This runs inside them. A process is held by a descriptor and not by its number, which another may
have later.
"""

import multiprocessing
import os
import signal
from contextlib import suppress
from multiprocessing.connection import wait
from threading import Thread


def follow_parent() -> None:
    """From now on this process ends with the one that started it by `multiprocessing`; without one nothing happens.

    Raises:
        OSError: the kernel has no descriptors of processes (Linux before 5.3).
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    descriptor = _opened(parent.pid)
    # Asked after it was opened: the number may have been another's by then.
    _start(descriptor if parent.is_alive() else None, None)


def follow(pid: int) -> None:
    """From now on this process ends with process `pid`, at once if that is gone.

    What started this process by `multiprocessing` ends too, where that is another one: it stands between them.

    Raises:
        OSError: the kernel has no descriptors of processes (Linux before 5.3).
    """
    parent = multiprocessing.parent_process()
    between = None if parent is None or parent.pid == pid else _opened(parent.pid)
    _start(_opened(pid), between)


def _opened(pid: int | None) -> int | None:
    """A descriptor of a process, which can be read from when it ends; None where it is gone."""
    assert pid is not None
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def _start(followed: int | None, between: int | None) -> None:
    Thread(target=_end_after, args=(followed, between), name="lifeline", daemon=True).start()


def _end_after(followed: int | None, between: int | None) -> None:
    if followed is not None:
        wait([followed])
    if between is not None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(between, signal.SIGKILL)
    # Nobody is left who could be told, and what is running may hold a lock that an orderly end would wait for.
    os.kill(os.getpid(), signal.SIGKILL)
