"""`fp8-grpo doctor`: what this machine can run, and how to install what is missing."""

import argparse
import os
import platform
from collections.abc import Callable, Iterator
from typing import Any

from flows.launch import say
from flows.termination import ExitCode
from fp8core.errors import UserError


def add_commands(commands: Any) -> None:
    parser = commands.add_parser("doctor", help="say what this machine can run")
    parser.set_defaults(command=doctor)


def doctor(options: argparse.Namespace) -> int:
    for line in (*_machine(), *_engines(), *_verifiers(), *_trackers()):
        say(line)
    return ExitCode.DONE


def _machine() -> Iterator[str]:
    from fp8core.store.manifest import installed_version

    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    libraries = (f"{name} {installed_version(name)}" for name in ("torch", "prefect", "mlflow", "ray"))
    yield f"Python {platform.python_version()}, {', '.join(libraries)}"
    yield f"{os.cpu_count()} cores, {platform.machine()}, {memory:.0f} GiB"
    # A missing or broken torch is a finding too.
    try:
        import torch
    except (ImportError, OSError) as error:
        yield f"torch cannot be imported: {error}; pip install --force-reinstall torch"
        return
    if not torch.cuda.is_available():
        yield "no GPU that torch can use"
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        yield f"GPU {i}: {gpu.name}, sm_{gpu.major}{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB"


def _verifiers() -> Iterator[str]:
    from fp8core.store.manifest import installed_version

    version = installed_version("math-verify")
    found = "not ready, it is not installed (pip install 'fp8-grpo[math]')" if version is None else f"ready, {version}"
    yield f"reward.verifier=math-verify: {found}"
    for name, library in (("judge", "httpx"), ("reward_model", "transformers")):
        yield f"reward.verifier={name}: ready, {library} {installed_version(library)}"


def _trackers() -> Iterator[str]:
    from flows.tracking.tracker import find_tracker
    from fp8core.config.shipped import TRACKERS
    from fp8core.store.manifest import installed_version

    for service in TRACKERS:
        try:
            find_tracker(service)
            yield f"tracking.services={service}: ready, {service} {installed_version(service)}"
        except UserError as error:
            yield f"tracking.services={service}: not ready, {str(error).removeprefix(f'tracking.services={service}: ')}"


def _engines() -> Iterator[str]:
    from fp8core.config.shipped import ENGINES
    from fp8core.rollout.registry import find_entry
    from fp8core.training.registry import TRAINERS, find_trainer

    settings: list[tuple[str, Callable[[str], Any]]] = [
        *((f"rollout.engine={name}", find_entry) for name in ENGINES),
        *((f"training.trainer={name}", find_trainer) for name in TRAINERS),
    ]
    for setting, find in settings:
        try:
            yield f"{setting}: ready, {find(setting.partition('=')[2]).requirements()}"
        except (UserError, ImportError, OSError) as error:
            yield f"{setting}: not ready, {str(error).removeprefix(f'{setting}: ')}"
