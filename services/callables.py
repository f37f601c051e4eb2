"""Finds the functions that a config names: `package.module:function` and `path/to/file.py:function`.

This module must not know what a function is for nor how it is called.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from services.config.base import ConfigError, nearest

_FORM = "write `package.module:function` or `path/to/file.py:function`"


def resolve(reference: str | Callable[..., Any]) -> Callable[..., Any]:
    """The function that `reference` names; a function itself is returned as it is.

    What comes after the colon may be dotted (`module:Class.method`). Paths start from the current working directory,
    which modules are looked for in as well. A file's functions travel to other processes by value, so that these need
    not be able to import it. Raises ConfigError with the reference, what is wrong with it and what to write instead.
    """
    if not isinstance(reference, str):
        if not callable(reference):
            raise ConfigError(f"{reference!r} is no function and no text that names one; {_FORM}")
        return reference
    place, colon, attributes = reference.rpartition(":")
    if not colon or not place or not attributes:
        raise ConfigError(f"{reference!r} does not name a function; {_FORM}")
    found: Any = _load_file(reference, place) if place.endswith(".py") else _load_module(reference, place)
    for name in attributes.split("."):
        if not hasattr(found, name):
            near = nearest(name, (known for known in dir(found) if not known.startswith("__")))
            hint = f"; did you mean {near!r}?" if near else ""
            raise ConfigError(f"{reference!r}: {_name_of(found)} has no {name!r}{hint}")
        found = getattr(found, name)
    if not callable(found):
        raise ConfigError(f"{reference!r} is of type {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return]


def reference_of(function: Callable[..., Any]) -> str:
    """The reference under which `function` is written down; `resolve` finds it again where it has a name of its own."""
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    if module is not None and file and (module.__name__ == "__main__" or module.__name__.startswith(_PREFIX)):
        return f"{file}:{name}"
    return f"{module.__name__ if module is not None else '?'}:{name}"


_PREFIX = "greenroom_callables_"


def _load_file(reference: str, place: str) -> ModuleType:
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"{reference!r}: there is no file {place} (looked in {Path.cwd()})")
    # One file is one module, however it is written; two files of the same name stay two.
    name = f"{_PREFIX}{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{reference!r}: {place} is no Python file")
    module = importlib.util.module_from_spec(spec)
    _make_importable(path.parent)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"{reference!r}: {place} cannot be imported: {_reason(error)}") from error
    # Imported here, for it takes a second that configs without files need not spend.
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(module)
    return module


def _load_module(reference: str, name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(f"{reference!r}: {name!r} is no module name; {_FORM}")
    # A console script, unlike `python -m`, does not look for modules where it is run.
    _make_importable(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name != missing and not name.startswith(f"{missing}."):
            raise ConfigError(f"{reference!r}: {name} cannot be imported: {_reason(error)}") from error
        raise ConfigError(
            f"{reference!r}: there is no module {missing!r} (looked in {Path.cwd()} and the installed packages)"
        ) from None
    except Exception as error:
        raise ConfigError(f"{reference!r}: {name} cannot be imported: {_reason(error)}") from error


def _make_importable(folder: Path) -> None:
    """Modules in `folder` are found, after all others. Ray hands this path on to the workers of a local cluster."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _reason(error: Exception) -> str:
    where = f" (line {error.lineno})" if isinstance(error, SyntaxError) else ""
    return f"{type(error).__name__}: {error}{where}"


def _name_of(found: Any) -> str:
    if isinstance(found, ModuleType):
        # The generated name of a file's module would tell the reader nothing.
        return (
            Path(found.__file__).name
            if found.__name__.startswith(_PREFIX) and found.__file__
            else found.__name__
        )
    return getattr(found, "__qualname__", None) or repr(found)
