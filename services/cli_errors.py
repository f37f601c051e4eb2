"""Errors as the command line tells them: what a user can mend in one message, anything else with its traceback."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer


@contextmanager
def errors_for_people() -> Iterator[None]:
    """What a user can mend is told in one message, without a traceback, and ends with status 1 (2: bad input)."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    for noisy in ("httpx", "ray", "filelock", "datasets"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    try:
        yield
    except KeyboardInterrupt as stop:
        _tell(stop, f"Stopped: {stop or 'interrupted'}")
        raise typer.Exit(130) from None
    except Exception as error:
        bad_input, expected = _kinds()
        if isinstance(error, bad_input):
            _tell(error, str(error))
            raise typer.Exit(2) from None
        if isinstance(error, expected):
            _tell(error, f"{type(error).__name__}: {error}")
            raise typer.Exit(1) from None
        raise


def _kinds() -> tuple[tuple[type[Exception], ...], tuple[type[Exception], ...]]:
    """Errors that are the input's, and errors whose message says all that a user needs."""
    from actors.environments.team import TeamEnvironmentError
    from actors.generation_pool import WorkerLostError
    from actors.limits import WaitLimitError
    from actors.rewards import CallbackError
    from actors.rollout import RolloutError
    from learners.optimiser import NonFiniteLossError
    from learners.snapshot import WeightSyncError
    from services.bundles import PlacementError
    from services.checkpoint import CheckpointError
    from services.config import ConfigError
    from services.jobs.client import JobServerError
    from services.learner_group import LearnerLostError
    from services.metrics import MetricsError
    from services.run_folder import RunFolderError
    from services.smarl.runners import RunnerLostError
    from services.sweep.sweep import SweepError

    return (ConfigError, RunFolderError), (
        CallbackError,
        CheckpointError,
        JobServerError,
        LearnerLostError,
        MetricsError,
        NonFiniteLossError,
        PlacementError,
        RolloutError,
        RunnerLostError,
        SweepError,
        TeamEnvironmentError,
        WaitLimitError,
        WeightSyncError,
        WorkerLostError,
    )


def _tell(error: BaseException, text: str) -> None:
    typer.echo("\n".join([text, *getattr(error, "__notes__", [])]), err=True)
