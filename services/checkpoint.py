"""Checkpoints: written aside and moved into place, so that a half-written one is never found.

Owns the folder of checkpoints and the run's counters; what a learner writes into its own folder is the learner's.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

logger = logging.getLogger(__name__)

STATE_FILE = "trainer_state.json"
_ASIDE = ".writing-"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read."""


class RunState(Protocol):
    """Where a run stands: a dataclass of plain values."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def step(self) -> int:
        """What checkpoints are named after."""
        ...


S = TypeVar("S", bound=RunState)

AfterRound = Callable[[Callable[[], Path]], None]
"""Called between two rounds of a run with a function that leaves a checkpoint there and returns its folder."""


@dataclass(slots=True)
class TrainerState:
    """Where a run of language models stands between two update rounds.

    Buffers are empty there and random streams follow from the counters, so this and the learners' own state are all
    that a bit-exact continuation needs.
    """

    epoch: int = 0
    next_item: int = 0
    """Position in the epoch of the first item that no finished update round contains."""
    update_round: int = 0
    reward_evaluations: int = 0
    """Joint answers scored so far: the step of every metric."""
    pending_metrics: dict[str, Any] = field(default_factory=dict)
    """What has been measured but not logged yet (`logging_steps`)."""
    reason: str = "interval"
    """Why the checkpoint was taken."""

    @property
    def step(self) -> int:
        return self.reward_evaluations


class CheckpointStore:
    """The `checkpoints/` folder of a run; `keep` newest ones stay (None: all).

    Args:
        after_write: called once a new checkpoint is in its place.
    """

    def __init__(
        self, folder: Path, keep: int | None, after_write: Callable[[], None] = lambda: None
    ) -> None:
        self.folder = folder
        self._keep, self._after_write = keep, after_write

    def write(self, state: RunState, write_learners: Callable[[Path], None]) -> Path:
        """Write `step_<state.step>`; `write_learners` fills the folder first, the state file comes last.

        Raises:
            CheckpointError: the disk is full or not writable; older checkpoints are untouched.
        """
        target = self.folder / f"step_{state.step:08d}"
        aside = self.folder / f"{_ASIDE}{target.name}"
        try:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            write_learners(aside)
            (aside / STATE_FILE).write_text(json.dumps(asdict(state), indent=2) + "\n")
            shutil.rmtree(target, ignore_errors=True)
            os.replace(aside, target)
        except OSError as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise CheckpointError(
                f"checkpoint {target} could not be written: {error}. Free space or change output_dir, then continue "
                f"with `greenroom train --resume {self.folder.parent}`; older checkpoints are untouched."
            ) from error
        self._prune()
        self._after_write()
        return target

    def latest(self) -> Path | None:
        """The newest complete checkpoint."""
        found = sorted(path.parent for path in self.folder.glob(f"step_*/{STATE_FILE}"))
        return found[-1] if found else None

    @staticmethod
    def read_state(checkpoint: Path, kind: type[S]) -> S:
        """The counters of a checkpoint, which a run with states of `kind` wrote."""
        path = checkpoint / STATE_FILE
        try:
            values = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        unknown = set(values) - {f.name for f in fields(kind)}
        if unknown:
            raise CheckpointError(
                f"{path} holds unknown fields {sorted(unknown)}: written by a newer version?"
            )
        return kind(**values)

    def _prune(self) -> None:
        if self._keep is None:
            return
        for old in sorted(self.folder.glob("step_*"))[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)
