"""What of a working directory travels to the cluster with a job, and whether what a run needs of it does.

Ray packs and sends it.  This module asks Ray's own rules beforehand, so that a forgotten file is told here and not
minutes later by a job that fails.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.config.base import ConfigError

LEFT_OUT = (
    "runs/",
    "checkpoints/",
    "wandb/",
    ".git/",
    ".venv/",
    "venv/",
    "__pycache__/",
    "*.egg-info/",
    ".*_cache/",
)
"""Patterns, in the manner of .gitignore, of what no job needs."""

_MIB = 2**20
_HEADING = "The job cannot be submitted"
_OWN = ("actors", "learners", "services")
_ABOUT_OUTPUT = {"output_dir", "run_name", "wandb_config"}
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Package:
    """The files of `folder` that travel, in bytes, by their relative paths."""

    folder: Path
    excludes: list[str]
    files: dict[str, int]

    @property
    def size(self) -> int:
        """Bytes, before compression."""
        return sum(self.files.values())

    def __contains__(self, path: str) -> bool:
        return path in self.files or any(name.startswith(f"{path}/") for name in self.files)

    def __str__(self) -> str:
        return f"{len(self.files)} files ({self.size / _MIB:.1f} MiB) of {self.folder}"


def look_into(folder: Path, excludes: Sequence[str]) -> Package:
    """What Ray will pack of `folder`: all but `LEFT_OUT`, `excludes`, and what .gitignore and .rayignore files name.

    Raises:
        ConfigError: there is no such folder, or it is too large for Ray to carry.
    """
    from ray._private import ray_constants
    from ray._private.runtime_env.packaging import GCS_STORAGE_MAX_SIZE, _dir_travel, _get_excludes

    logging.getLogger("ray._private.runtime_env.packaging").setLevel(logging.ERROR)
    if not folder.is_dir():
        raise ConfigError(f"--working-dir: {folder} is no folder", _HEADING)
    patterns = [*LEFT_OUT, *excludes]
    files: dict[str, int] = {}

    def note(path: Path) -> None:
        if path.is_file():
            files[path.relative_to(folder).as_posix()] = path.stat().st_size

    _dir_travel(
        folder,
        [_get_excludes(folder, [*ray_constants.get_runtime_env_default_excludes(), *patterns])],
        note,
        include_gitignore=os.environ.get(ray_constants.RAY_RUNTIME_ENV_IGNORE_GITIGNORE, "0") != "1",
    )
    package = Package(folder, patterns, files)
    if package.size >= GCS_STORAGE_MAX_SIZE:
        largest = sorted(files, key=lambda name: -files[name])[:_SHOWN]
        raise ConfigError(
            f"--working-dir: {package} are more than the {GCS_STORAGE_MAX_SIZE / _MIB:.0f} MiB that travel with a job; "
            f"the largest are {', '.join(f'{name} ({files[name] / _MIB:.0f} MiB)' for name in largest)}. Leave them "
            "out with --exclude PATTERN, and keep models and data on a file system that the nodes share",
            _HEADING,
        )
    return package


def check(package: Package, config_file: str, settings: Mapping[str, Any]) -> None:
    """See that the configuration and whatever its `settings` name with a relative path are in the package.

    Raises:
        ConfigError: something is not; lists all of it.
    """
    found = []
    if config_file not in package:
        found.append(f"{config_file}: {_left_out(package, config_file)}")
    for key, text in _texts(settings):
        path, is_code = _path_in(text)
        if path is None or os.path.isabs(path):
            continue
        there = (package.folder / path).exists()
        if there and path not in package:
            found.append(f"{key}: {_left_out(package, path)}")
        elif is_code and not there:
            found.append(
                f"{key}: {text!r}: there is no file {path} in the working directory {package.folder}"
            )
    found += [f"{name}: {_hides(name)}" for name in _OWN if _would_hide(package, name)]
    if found:
        raise ConfigError(found, _HEADING)


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if key or name not in _ABOUT_OUTPUT:
                yield from _texts(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _texts(inner, f"{key}[{index}]")
    elif isinstance(value, str):
        yield key, value


def _path_in(text: str) -> tuple[str | None, bool]:
    """The path that a setting may name, and whether it names a function in a file."""
    place, colon, _ = text.rpartition(":")
    if colon and place.endswith(".py"):
        return os.path.normpath(os.path.expanduser(place)), True
    if not text or len(text) > 1000 or "\n" in text or "\0" in text:
        return None, False
    return os.path.normpath(text), False


def _left_out(package: Package, path: str) -> str:
    if path.startswith(".."):
        return f"{path} lies outside the working directory {package.folder}, of which alone a copy goes to the cluster"
    return (
        f"{path} does not go to the cluster: a .gitignore or .rayignore file or an exclude pattern leaves it out. Name "
        f"it with --exclude '!{path}', change the ignore file, or give an absolute path that the nodes see"
    )


def _would_hide(package: Package, name: str) -> bool:
    """In a job the working directory comes before installed packages; only a checkout of Greenroom may hide it."""
    is_greenroom = "services/cli.py" in package.files and "actors/engine.py" in package.files
    return not is_greenroom and (f"{name}.py" in package.files or name in package)


def _hides(name: str) -> str:
    return (
        f"in the job, {name} in the working directory would be imported in place of Greenroom's own package {name}: "
        f"rename it, or leave it out with --exclude {name}"
    )
