"""The program inside the sandbox of the python tool. It imports nothing of ours, which a container may lack.

Requests come by standard input, and answers leave by standard output: JSON, a line each. Processes that code has
started end with its call, and their output is dropped.
"""

import ast
import contextlib
import ctypes
import faulthandler
import io
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
    os.dup2(0, _REQUESTS, inheritable=False)
    os.dup2(1, _ANSWERS, inheritable=False)
    os.closerange(5, 16)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nowhere, standard)
    os.close(nowhere)
    sys.path[:] = [path for path in sys.path if path] + packages
    sys.argv[:] = [""]
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    memory = (memory_mb + _RUNTIME_MB) << 20
    for limit, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 256),
    ):
        resource.setrlimit(limit, (value, value))
    names = {"__name__": "__main__", "__builtins__": __builtins__}
    with os.fdopen(_REQUESTS, "rb") as lines:
        for line in lines:
            used = resource.getrusage(resource.RUSAGE_SELF)
            processor = math.ceil(used.ru_utime + used.ru_stime + seconds)
            resource.setrlimit(resource.RLIMIT_CPU, (processor, resource.RLIM_INFINITY))
            # A container lives on when the process that started it is killed.
            faulthandler.dump_traceback_later(2 * seconds + 1, exit=True, file=2)
            answer = json.dumps(run(json.loads(line), names, characters)).encode() + b"\n"
            end_children()
            faulthandler.cancel_dump_traceback_later()
            while answer:
                answer = answer[os.write(_ANSWERS, answer) :]


def run(code: str, names: dict[str, object], characters: int) -> tuple[str, str, str]:
    """The printed text, the value of the last line, and the error."""
    own, output = os.getpid(), io.StringIO()
    value = error = ""
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            parsed = ast.parse(code, "<code>")
            last = parsed.body.pop() if parsed.body and isinstance(parsed.body[-1], ast.Expr) else None
            exec(compile(parsed, "<code>", "exec"), names)
            if last is not None:
                found = eval(compile(ast.Expression(last.value), "<code>", "eval"), names)  # type: ignore[attr-defined]
                value = "" if found is None else without_addresses(repr(found))
    except BaseException as raised:  # noqa: BLE001 - it is the answer
        error = without_addresses(_described(raised))
    if os.getpid() != own:
        os._exit(0)  # A copy that code forked and let return.
    printed = "" if output.closed else output.getvalue()
    # One more than is shown: by it a cut is seen.
    return printed[: characters + 1], value[: characters + 1], error[: characters + 1]


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
