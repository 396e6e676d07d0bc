"""A process that starts an engine, says so when it runs, and waits for a test to kill it."""

import signal

from sglang_cases import prepared_build, start_engine

if __name__ == "__main__":
    engine = start_engine(prepared_build(), graphs=False)
    print("running", flush=True)
    signal.pause()
