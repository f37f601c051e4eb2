"""A copy of a run elsewhere, such as in an object store: made after every checkpoint, and read to go on from.

Owns what is copied and in which order, so that what is half there is never taken for whole.  The transport is pyarrow's
or fsspec's.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from pyarrow import ArrowException, ArrowInvalid, fs

from services.checkpoint import STATE_FILE, CheckpointError, CheckpointStore
from services.config import CommonRun, ConfigError
from services.run_folder import CONFIG_FILE, RunFolder, RunFolderError

logger = logging.getLogger(__name__)

_FAILURES = (OSError, ArrowException)
_FILES = (CONFIG_FILE, "metrics.jsonl")
_FOLDERS = ("sources", "final")


class RunCopy:
    """The copy of one run.

    Args:
        uri: a folder or a URI, such as s3://bucket/runs/name.

    Raises:
        ConfigError: there is nothing that can be written to or read.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri.rstrip("/")
        self._files, self._root = _open(self.uri)

    def bring_up_to_date(self, run: RunFolder) -> None:
        """Copy what is new in `run`, and remove checkpoints that are gone there.

        Raises:
            OSError, ArrowException: the store failed; what it held is whole still.
        """
        here = {path.parent.name for path in run.checkpoints.glob(f"step_*/{STATE_FILE}")}
        there = self._checkpoints()
        for name in sorted(here - there):
            target = f"{self._root}/checkpoints/{name}"
            # Its state comes last: without it, a checkpoint is not one.
            for path in sorted((run.checkpoints / name).rglob("*"), key=lambda p: p.name == STATE_FILE):
                self._copy(path, f"{target}/{path.relative_to(run.checkpoints / name)}")
        for name in sorted(there - here):
            self._files.delete_file(f"{self._root}/checkpoints/{name}/{STATE_FILE}")
            self._files.delete_dir(f"{self._root}/checkpoints/{name}")
        for name in _FILES:
            self._copy(run.path / name, f"{self._root}/{name}")
        for folder in _FOLDERS:
            for path in sorted((run.path / folder).rglob("*")):
                self._copy(path, f"{self._root}/{path.relative_to(run.path)}")

    def fetch(self, output_dir: str | Path) -> RunFolder:
        """The run with its newest checkpoint, in a new folder of its name below `output_dir`.

        Raises:
            RunFolderError: such a folder exists, or there is no run to fetch.
        """
        folder = Path(output_dir).expanduser().absolute() / self.uri.rpartition("/")[2]
        if folder.exists():
            raise RunFolderError(
                f"{folder} exists already: continue it with `greenroom train --resume {folder}`, or give another "
                "output_dir"
            )
        try:
            newest = max(self._checkpoints(), default=None)
            if newest is None:
                raise RunFolderError(f"{self.uri} holds no run with a complete checkpoint")
            wanted = (*_FILES, "sources/", f"checkpoints/{newest}/")
            for path in self._listed():
                name = path.removeprefix(f"{self._root}/")
                if name.startswith(wanted):
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    fs.copy_files(
                        path,
                        str(folder / name),
                        source_filesystem=self._files,
                        destination_filesystem=fs.LocalFileSystem(),
                    )
        except _FAILURES as error:
            raise RunFolderError(f"{self.uri} cannot be read: {error}") from error
        return RunFolder.open(folder)

    def check_writable(self) -> None:
        """Raise ConfigError where nothing can be written."""
        probe = f"{self._root}/.greenroom-probe"
        try:
            self._files.create_dir(self._root, recursive=True)
            with self._files.open_output_stream(probe) as stream:
                stream.write(b"")
            self._files.delete_file(probe)
        except _FAILURES as error:
            raise ConfigError(f"storage_path: nothing can be written to {self.uri}: {error}") from error

    def _checkpoints(self) -> set[str]:
        """Names of those that are whole."""
        return {Path(path).parent.name for path in self._listed() if path.endswith(f"/{STATE_FILE}")}

    def _listed(self) -> list[str]:
        """Every file of the copy."""
        found = self._files.get_file_info(fs.FileSelector(self._root, recursive=True, allow_not_found=True))
        return [each.path for each in found if each.type == fs.FileType.File]

    def _copy(self, path: Path, target: str) -> None:
        if not path.is_file():
            return
        self._files.create_dir(target.rpartition("/")[0], recursive=True)
        fs.copy_files(
            str(path), target, source_filesystem=fs.LocalFileSystem(), destination_filesystem=self._files
        )


def checkpoints_of(run: RunFolder, config: CommonRun) -> CheckpointStore:
    """The checkpoints of a run, each copied to `storage_path` once it is written.

    Raises:
        ConfigError: nothing can be written there.
    """
    if config.storage_path is None:
        return CheckpointStore(run.checkpoints, config.keep_checkpoints)
    copy = RunCopy(f"{config.storage_path.rstrip('/')}/{run.path.name}")
    copy.check_writable()

    def bring_up_to_date() -> None:
        try:
            copy.bring_up_to_date(run)
        except _FAILURES as error:
            # A store may be away for a while; training need not stop for it.
            logger.warning("%s is not up to date, the next checkpoint tries again: %s", copy.uri, error)

    return CheckpointStore(run.checkpoints, config.keep_checkpoints, after_write=bring_up_to_date)


def leave_final_copy(run: RunFolder, config: CommonRun) -> None:
    """Bring the copy up to date at the end of a run.

    Raises:
        CheckpointError: the store failed.
    """
    if config.storage_path is None:
        return
    copy = RunCopy(f"{config.storage_path.rstrip('/')}/{run.path.name}")
    try:
        copy.bring_up_to_date(run)
    except _FAILURES as error:
        raise CheckpointError(
            f"the run is whole in {run.path}, but its copy {copy.uri} is not up to date: {error}"
        ) from error


def is_uri(place: str) -> bool:
    """Whether `place` is a URI, and not a folder of this machine."""
    return "://" in place


def _open(uri: str) -> tuple[Any, str]:
    if not is_uri(uri):
        return fs.LocalFileSystem(), str(Path(uri).expanduser().absolute())
    try:
        try:
            files, root = fs.FileSystem.from_uri(uri)
        except ArrowInvalid:  # a kind of store that pyarrow does not know itself
            from fsspec.core import url_to_fs

            other, root = url_to_fs(uri)
            files = fs.PyFileSystem(fs.FSSpecHandler(other))
    except (*_FAILURES, ImportError, ValueError) as error:
        raise ConfigError(f"storage_path: {uri} cannot be opened: {error}") from error
    return files, root.rstrip("/")
