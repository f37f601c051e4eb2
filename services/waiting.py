"""Waiting for Ray: with a limit, and with an error that says what was waited for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayTaskError

from actors.limits import WaitLimitError


def wait_all(refs: Sequence[Any], what: str, seconds: float, remedy: str) -> None:
    """Until every one of `refs` is there, be it a result or an error.

    Raises:
        WaitLimitError: not all are after `seconds`; says `what` was waited for and the `remedy`.
    """
    _, late = ray.wait(list(refs), num_returns=len(refs), timeout=seconds, fetch_local=False)
    if late:
        raise WaitLimitError(
            f"waited {seconds:g} s for {what}; {len(late)} of {len(refs)} are still not done. {remedy}"
        )


def fetch(refs: Sequence[Any], what: str, seconds: float, remedy: str) -> list[Any]:
    """The results of all `refs`; nothing runs on any more when the first error is raised.

    Raises:
        WaitLimitError: as `wait_all`.
        Exception: the first error among the results, as it was raised where it happened.
    """
    wait_all(refs, what, seconds, remedy)
    try:
        results: list[Any] = ray.get(list(refs), timeout=seconds)
    except GetTimeoutError:
        raise WaitLimitError(f"waited {seconds:g} s for the results of {what}. {remedy}") from None
    except RayTaskError as error:
        # Its text is a remote traceback; what a user can mend is in the cause.
        if isinstance(error.cause, Exception):
            raise error.cause from error
        raise
    return results
