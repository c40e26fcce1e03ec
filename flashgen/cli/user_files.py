"""Imports a user's Python files, named as `file.py:name`, and describes errors in them by the user's own lines."""

from __future__ import annotations

import importlib.util
import os
import site
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import Any

from flashgen.errors import FlashgenError, SpecError

_PREFIX = "flashgen_user_file:"
_PACKAGE = str(Path(__file__).resolve().parents[1])
_user_files: set[str] = set()  # including files that could not be imported


def name_in_file(path: Path, name: str) -> Any:
    """Returns the object `name` of a Python file, which is imported (and so run) once per process.

    Raises SpecError if the file or the name is missing, or if the file raises an exception of flashgen. Other
    exceptions of the file pass through; `describe_error` describes them.
    """
    module = _import(path.resolve())
    if not hasattr(module, name):
        public = sorted(key for key in dir(module) if not key.startswith("_"))
        raise SpecError(f"{path} has no {name!r}; it has {', '.join(public) or 'no names'}")
    return getattr(module, name)


def describe_error(error: Exception) -> str | None:
    """Describes an error in a user's file: the error, and the lines of the user's code in its traceback.

    Returns None for an error whose traceback has no line of a user's file, which is a bug of flashgen.
    """
    steps = traceback.extract_tb(error.__traceback__)
    first = next((number for number, step in enumerate(steps) if step.filename in _user_files), len(steps))
    unreadable = isinstance(error, SyntaxError) and error.filename in _user_files
    if first == len(steps) and not unreadable:
        return None
    where = traceback.format_list([step for step in steps[first:] if _is_users(step.filename)])
    if unreadable:
        where += traceback.format_exception_only(error)[:-1]  # the line, with a marker below it
    lines = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ()), *where]
    return "\n".join(line.rstrip("\n") for line in lines)


def _is_users(filename: str) -> bool:
    """Returns whether a file belongs to the user's own code, not to flashgen, an installed package or Python."""
    others = (_PACKAGE, *site.getsitepackages(), *sysconfig.get_paths().values())
    return not filename.startswith(("<frozen ", *(folder + os.sep for folder in others)))


def _import(path: Path) -> Any:
    key = f"{_PREFIX}{path}"
    if key in sys.modules:
        return sys.modules[key]
    if not path.is_file():
        raise SpecError(f"SPEC names {path}, which is not a file")
    specification = importlib.util.spec_from_file_location(key, path)
    assert specification is not None and specification.loader is not None  # a .py file always has both
    module = importlib.util.module_from_spec(specification)
    sys.modules[key] = module
    _user_files.add(str(path))
    try:
        specification.loader.exec_module(module)
    except FlashgenError as error:
        del sys.modules[key]
        raise SpecError(f"{_line_of(error, path)}: {error}") from error
    except SystemExit:
        del sys.modules[key]
        raise SpecError(f'{path} exits when it is imported: put that under `if __name__ == "__main__":`') from None
    except BaseException:
        del sys.modules[key]
        raise
    return module


def _line_of(error: BaseException, path: Path) -> str:
    """Returns the innermost line of the file in the error's traceback, as file.py:12."""
    lines = [step.lineno for step in traceback.extract_tb(error.__traceback__) if step.filename == str(path)]
    return f"{path}:{lines[-1]}"
