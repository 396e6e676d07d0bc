"""The program inside the sandbox of the python tool. It imports nothing of ours, which a container may lack.

Requests come by standard input, and answers leave by standard output: JSON, a line each.
"""

import ast
import contextlib
import faulthandler
import io
import json
import os
import re
import resource
import sys

_RUNTIME_MB = 64
"""Address space of the interpreter itself."""
_ADDRESS = re.compile(r"\bat 0x[0-9a-f]{6,16}\b")


def main(seconds: int, memory_mb: int, characters: int, packages: list[str]) -> None:
    """Answer until there are no more requests; `characters`: of each part of an answer."""
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nowhere, standard)
    sys.path[:] = [path for path in sys.path if path] + packages
    sys.argv[:] = [""]
    memory = (memory_mb + _RUNTIME_MB) << 20
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    names = {"__name__": "__main__", "__builtins__": __builtins__}
    for line in requests:
        # A container lives on when the process that started it is killed.
        faulthandler.dump_traceback_later(seconds + 1, exit=True, file=2)
        answer = json.dumps(run(json.loads(line), names, characters)).encode()
        faulthandler.cancel_dump_traceback_later()
        answers.write(answer + b"\n")
        answers.flush()


def run(code: str, names: dict[str, object], characters: int) -> tuple[str, str, str]:
    """The printed text, the value of the last line, and the error."""
    output = io.StringIO()
    value = ""
    error = ""
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            tree = ast.parse(code, "<code>")
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, "<code>", "exec"), names)
            if last is not None:
                result = eval(compile(ast.Expression(last.value), "<code>", "eval"), names)  # type: ignore[attr-defined]
                value = "" if result is None else repr(result)
    except BaseException as raised:  # noqa: BLE001 - it is the answer
        error = _error_text(raised)
    stdout = "" if output.closed else output.getvalue()
    # Where an object lies differs from run to run. One character more than is shown: by it a cut is seen.
    stdout, value, error = (_ADDRESS.sub("at 0x", text)[: characters + 1] for text in (stdout, value, error))
    return stdout, value, error


def _error_text(error: BaseException) -> str:
    line = None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<code>":
            line = trace.tb_lineno
        trace = trace.tb_next
    place = "" if line is None else f"line {line}: "
    return f"{place}{type(error).__name__}: {error}".removesuffix(": ")


if __name__ == "__main__":
    seconds, memory_mb, characters = map(int, sys.argv[1:4])
    main(seconds, memory_mb, characters, sys.argv[4:])
