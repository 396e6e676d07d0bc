"""Keep freed memory in this process, for emulation on a CPU.

glibc releases freed blocks of 32 MB and more, and the next tensor gets pages that the system fills with zeros first.
That takes several times as long as most element-wise operations on it. No value depends on it.
"""

import ctypes

# Options of glibc's `mallopt` (malloc.h). It still releases blocks of 1 GiB, and what is free beyond 2 GiB at the end.
_TRIM_THRESHOLD = (-1, 2**31 - 1)
_MMAP_THRESHOLD = (-3, 2**30)
# Arenas of other threads end at 64 MB, and are released whole.
_ARENA_MAX = (-8, 1)


def keep_freed_memory() -> None:
    """From now on; threads that allocated before keep their arenas. Does nothing where the C library is not glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and mallopt(*_MMAP_THRESHOLD):
        mallopt(*_TRIM_THRESHOLD)
        mallopt(*_ARENA_MAX)
