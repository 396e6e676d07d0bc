"""The program inside the sandbox of the python tool. It imports nothing of ours, which a container may lack.

Requests come by standard input, and answers leave by standard output: JSON, a line each. Output of the code goes to
standard error. Processes that code has started end with its call.
"""

import ast
import contextlib
import ctypes
import faulthandler
import json
import math
import os
import re
import resource
import signal
import sys

_REQUESTS, _ANSWERS = 3, 4
"""Always the same numbers: those of files that code opens must be the same in a replay."""
_RUNTIME_MB = 64
"""Address space of the interpreter itself."""
_PR_SET_CHILD_SUBREAPER = 36
_ADDRESS = re.compile(r"\bat 0x[0-9a-f]{6,16}\b")


def main(limits: list[int], packages: list[str]) -> None:
    """Answer until there are no more requests; `limits`: seconds, MiB and characters of a call."""
    seconds, memory_mb, characters = limits
    for ours, theirs in ((0, _REQUESTS), (1, _ANSWERS), (os.open(os.devnull, os.O_RDONLY), 0), (2, 1)):
        os.dup2(ours, theirs, inheritable=theirs < _REQUESTS)
    os.closerange(5, 16)
    sys.path[:] = [path for path in sys.path if path] + packages
    sys.argv[:] = [""]
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    memory = (memory_mb + _RUNTIME_MB) << 20
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        resource.setrlimit(limit, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    names = {"__name__": "__main__", "__builtins__": __builtins__}
    output = sys.stdout
    with open(os.devnull, "w") as nowhere, os.fdopen(_REQUESTS, "rb") as lines:
        for line in lines:
            used = resource.getrusage(resource.RUSAGE_SELF)
            limit = math.ceil(used.ru_utime + used.ru_stime + seconds)
            resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
            # A container lives on when the process that started it is killed.
            faulthandler.dump_traceback_later(2 * seconds + 1, exit=True, file=nowhere)
            answer = json.dumps(run(json.loads(line), names, characters)).encode() + b"\n"
            # Code may have replaced ours, or closed it.
            for each in (output, sys.stdout):
                with contextlib.suppress(BaseException):
                    each.flush()
            end_children()
            faulthandler.cancel_dump_traceback_later()
            while answer:
                answer = answer[os.write(_ANSWERS, answer) :]


def run(code: str, names: dict[str, object], characters: int) -> tuple[str, str]:
    """Value of the last line, and error; each has one character beyond the limit at most, by which a cut shows."""
    own = os.getpid()
    try:
        parsed = ast.parse(code, "<code>")
        last = parsed.body.pop() if parsed.body and isinstance(parsed.body[-1], ast.Expr) else None
        exec(compile(parsed, "<code>", "exec"), names)
        if last is None:
            return "", ""
        value = eval(compile(ast.Expression(last.value), "<code>", "eval"), names)  # type: ignore[attr-defined]
        return ("" if value is None else without_addresses(repr(value))[: characters + 1]), ""
    except BaseException as error:  # noqa: BLE001 - it is the answer
        return "", without_addresses(_described(error))[: characters + 1]
    finally:
        if os.getpid() != own:
            os._exit(0)  # A copy that code forked and let return.


def without_addresses(text: str) -> str:
    """Where an object lies differs from run to run."""
    return _ADDRESS.sub("at 0x", text)


def end_children() -> None:
    """Kill and reap what code has started, where our process is one of the first in its namespace."""
    if os.getpid() > 2:
        return
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        os.kill(-1, signal.SIGKILL)
        while True:
            os.wait()


def _described(error: BaseException) -> str:
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<code>":
            line = trace.tb_lineno
        trace = trace.tb_next
    place = "" if line is None else f"line {line}: "
    try:
        return f"{place}{type(error).__name__}: {error}".removesuffix(": ")
    except BaseException:  # noqa: BLE001 - of the error's own `__str__`
        return f"{place}{type(error).__name__}"


if __name__ == "__main__":
    main([*map(int, sys.argv[1:4])], sys.argv[4:])
