"""What a run was made with: our sources, the libraries, the machine."""

import hashlib
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

from pydantic import JsonValue

_LIBRARIES = ("torch", "numpy", "pyarrow", "prefect", "mlflow")


def code_version(*packages: Path) -> str:
    """SHA-256 (64 hex digits) over the sorted (relative path, content) of the .py files of package folders.

    Paths start with the folder's name, so that a checkout and an installed copy of the same sources agree.
    """
    sources = sorted(
        ((package.name / path.relative_to(package)).as_posix(), path)
        for package in packages
        for path in package.rglob("*.py")
    )
    assert sources, f"no sources in {', '.join(map(str, packages))}"
    digest = hashlib.sha256()
    for name, path in sources:
        digest.update(f"{name}\n{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def library_versions() -> dict[str, str]:
    """Version of Python and of each installed library that can change numbers or files."""
    versions = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _cpu_model() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def hardware() -> dict[str, JsonValue]:
    """Processor model, logical cores (None: unknown), memory in bytes, instruction set."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "machine": platform.machine(),
    }


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints, or None when there is no git or it refuses."""
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def git_state(folder: Path) -> dict[str, JsonValue]:
    """Commit of the checkout that tracks a folder, and whether it has changes; empty when no checkout does."""
    # A folder installed inside somebody else's checkout is not tracked by it.
    commit = _git(folder, "rev-parse", "HEAD") if _git(folder, "ls-files") else None
    if commit is None:
        return {}
    return {"commit": commit, "dirty": bool(_git(folder, "status", "--porcelain"))}
