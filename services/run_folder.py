"""The folder that a run leaves behind: where everything in it lies.  Writes nothing but the configuration."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CONFIG_FILE = "config.yaml"


class RunFolderError(ValueError):
    """A folder cannot serve as a run folder."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """One run's folder."""

    path: Path

    @classmethod
    def create(cls, output_dir: str | Path, run_name: str | None, algorithm: str) -> RunFolder:
        """Make `output_dir/run_name`; without a name, `<algorithm>-<date>-<time>`.

        Raises:
            RunFolderError: the folder holds something already, or cannot be made.
        """
        name = run_name or f"{algorithm}-{time.strftime('%Y%m%d-%H%M%S')}"
        path = Path(output_dir).expanduser().absolute() / name
        suffix = 2
        while run_name is None and path.exists():  # two runs started within one second
            path = path.with_name(f"{name}-{suffix}")
            suffix += 1
        if path.is_dir() and any(path.iterdir()):
            raise RunFolderError(
                f"run_name: {path} holds a run already; choose another run_name, or continue that run with "
                f"`greenroom train --resume {path}`"
            )
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunFolderError(f"output_dir: {path} cannot be made: {error}") from error
        return cls(path)

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """An existing run folder.

        Raises:
            RunFolderError: it is none.
        """
        folder = cls(Path(path).expanduser().absolute())
        if not folder.config_file.is_file():
            raise RunFolderError(f"{path} is no run folder: it has no {CONFIG_FILE}")
        return folder

    @property
    def config_file(self) -> Path:
        return self.path / CONFIG_FILE

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def final(self) -> Path:
        """Models alone, in Hugging Face layout, once the run has ended."""
        return self.path / "final"

    @property
    def sources(self) -> Path:
        """Models and tokenizers that were handed to a trainer as objects."""
        return self.path / "sources"

    @property
    def cluster_file(self) -> Path:
        """Where the Ray cluster of the run is, for commands to a running service."""
        return self.path / "cluster.json"

    def write_config(self, text: str) -> None:
        self.path.mkdir(parents=True, exist_ok=True)  # a start that failed took it back
        self.config_file.write_text(text)

    @contextmanager
    def kept_once_started(self) -> Iterator[None]:
        """Take a folder back in which nothing has begun when the start fails: the same command may then run again."""
        try:
            yield
        except BaseException:
            if {each.name for each in self.path.iterdir()} <= {CONFIG_FILE, self.sources.name}:
                shutil.rmtree(self.path)
            raise
