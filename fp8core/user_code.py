"""Functions and classes of the user's own, by path: `module:name`, or `path/to/file.py:name`.

A file is executed from the bytes that its digest is of. Its module is named by the digest, and hides no other one.
After `find_neighbours` it finds the files beside it. Their code is in no digest.
"""

import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from fp8core.errors import UserError, described_error


class UserCode(NamedTuple):
    """A function or class, its file, and the SHA-256 of that file."""

    target: Callable[..., Any]
    file: Path
    digest: str


def find_neighbours(path: str) -> None:
    """From now on let imports find the neighbours of a path's file, where no library has their name."""
    if (file := file_of_path(path)) is not None and (folder := str(file.parent)) not in sys.path:
        sys.path.append(folder)


def load_code(path: str, kind: str) -> UserCode:
    """The function or class of a path; `kind` is the word for it in errors. Raises UserError."""
    place, _, attribute = path.rpartition(":")
    module, file, digest = _load(place)
    target = getattr(module, attribute, None)
    if not callable(target):
        raise UserError(f"{place} has no {kind} {attribute}")
    return UserCode(target, file, digest)


def digest_of_code(path: str) -> tuple[Path, str]:
    """The file that a path names, and its SHA-256 as it is now; a module is imported. Raises UserError."""
    place = path.rpartition(":")[0]
    if (file := file_of_path(path)) is not None:
        return file, _digest(_source(file))
    _, file, digest = _load(place)
    return file, digest


def file_of_path(path: str) -> Path | None:
    """The file that a path names by itself, absolute; None: it names a module."""
    place = path.rpartition(":")[0]
    return Path(place).absolute() if place.endswith(".py") else None


def file_of(target: Callable[..., Any]) -> str | None:
    """The file of the user's own that defines what `load_code` has found; None: it is of this package."""
    module = getattr(target, "__module__", "")
    return None if module.startswith("fp8core.") else getattr(sys.modules.get(module), "__file__", None)


def check_call(function: Callable[..., Any], name: str, positional: Sequence[str], keywords: Iterable[str]) -> None:
    """Raises UserError: it cannot be called with arguments of these names."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # One written in C may have none to read.
    keywords = list(keywords)
    try:
        signature.bind(*positional, **dict.fromkeys(keywords))
    except TypeError as error:
        arguments = ", ".join([*positional, *(f"{keyword}=..." for keyword in keywords)])
        raise UserError(f"it is called as {name}({arguments}), and is defined as {name}{signature}: {error}") from error


def _load(place: str) -> tuple[ModuleType, Path, str]:
    if place.endswith(".py"):
        file = Path(place).absolute()
        source = _source(file)
        return _import(place, lambda: _module_of(file, source)), file, _digest(source)
    module = _import(place, lambda: importlib.import_module(place))
    origin = getattr(module, "__file__", None)
    if origin is None:
        raise UserError(f"{place} has no source file")
    return module, Path(origin), _digest(_source(Path(origin)))


def _import(place: str, load: Callable[[], ModuleType]) -> ModuleType:
    try:
        return load()
    except UserError:  # One of ours, which lacks a library.
        raise
    except (Exception, SystemExit) as error:  # Whatever a module of the user's own does when it is imported.
        lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.name == "<module>"]
        where = f" ({lines[-1].filename}:{lines[-1].lineno})" if lines else ""
        raise UserError(f"{place} cannot be imported: {described_error(error)}{where}") from error


def _source(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from error


def _digest(source: bytes) -> str:
    return hashlib.sha256(source).hexdigest()


_modules: dict[tuple[Path, bytes], ModuleType] = {}


def _module_of(file: Path, source: bytes) -> ModuleType:
    """A process keeps the module that it executed; an edited file is another module."""
    if (file, source) not in _modules:
        name = f"user_code_{_digest(source)[:16]}"
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None, "a name in .py has a loader"
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            exec(compile(source, str(file), "exec", dont_inherit=True), vars(module))
        except BaseException:
            sys.modules.pop(name, None)
            raise
        _modules[file, source] = module
    return _modules[file, source]


def import_attribute(path: str, place: str) -> Any:
    """The object at an import path `package.module:name`; raises UserError, which begins with `place`."""
    module_name, _, attribute = path.partition(":")
    try:
        module = _import(module_name, lambda: importlib.import_module(module_name))
    except UserError as error:
        raise UserError(f"{place}: {error}") from error
    if not hasattr(module, attribute):
        raise UserError(f"{place}: module {module_name} has no {attribute}")
    return getattr(module, attribute)
