"""Engines and trainer ranks as processes of a Ray cluster."""

from fp8core.processes.variables import set_variables

# Before Ray is imported, which reads it then: at a loss it would print guesses of its own between our lines.
set_variables({}, {"RAY_DEDUP_LOGS_SKIP_REGEX": "."})
