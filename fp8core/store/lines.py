"""Files of lines that only grow, each line durable before the next; readable in parts from both ends.

A line counts once it ends with a newline. Only the last can be torn: by a kill or a power cut in the middle of an
append that was never acknowledged.
"""

import os
from collections.abc import Iterator
from io import FileIO

_BLOCK = 1 << 16

Line = tuple[int, bytes]
"""Byte offset and content without its newline."""


def whole_end(file: FileIO) -> int:
    """Bytes of the file up to the end of its last whole line. Raises OSError."""
    pieces = lines_backward(file, os.fstat(file.fileno()).st_size)
    end, _ = next(pieces)
    last, line = next(pieces, (0, b""))
    # After a power cut a file can have its new length and zeros for content.
    return last if b"\0" in line else end


def lines_forward(file: FileIO, begin: int, end: int) -> Iterator[Line]:
    """The whole lines between two offsets; reads on only as far as it is asked. Raises OSError."""
    rest, position = b"", begin
    while position < end:
        block = os.pread(file.fileno(), min(_BLOCK, end - position), position)
        if not block:
            return
        *lines, rest_after = (rest + block).split(b"\n")
        offset = position - len(rest)
        for line in lines:
            yield offset, line
            offset += len(line) + 1
        rest, position = rest_after, position + len(block)


def lines_backward(file: FileIO, end: int) -> Iterator[Line]:
    """What lies between newlines before an offset, the last first: nothing, or the torn line, is the first of them.

    Reads on only as far as it is asked. Raises OSError.
    """
    rest = b""
    while end > 0:
        start = max(0, end - _BLOCK)
        first, *others = (os.pread(file.fileno(), end - start, start) + rest).split(b"\n")
        offset = end + len(rest)
        for piece in reversed(others):
            offset -= len(piece)
            yield offset, piece
            offset -= 1
        rest, end = first, start
    yield 0, rest


def append_durably(file: FileIO, data: bytes) -> None:
    """Adds whole lines: they are on disk when this returns. Raises OSError (a full disk) and then adds nothing."""
    end = os.fstat(file.fileno()).st_size
    try:
        written = 0
        while written < len(data):
            written += file.write(data[written:])
        os.fsync(file.fileno())
    except OSError:
        # Part of a line in the middle would make the whole file unreadable.
        file.truncate(end)
        raise
