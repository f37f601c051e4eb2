"""Limits on user code: a callback that hangs becomes an error that says what was waited for."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_SIGNAL = signal.SIGUSR2
"""Not SIGALRM: reward functions that run code commonly use that one themselves."""


class WaitLimitError(TimeoutError):
    """Something took longer than its limit; the message says what, and which setting moves the limit."""


def call_with_limit(function: Callable[[], T], seconds: float, what: str) -> T:
    """`function()`, given up after `seconds`.

    In the main thread the call is interrupted where it stands, sleeps and subprocess waits included.  Elsewhere signals
    do not reach, so the call runs in a thread that is abandoned when the limit passes.

    Raises:
        WaitLimitError: it took longer.
    """
    error = WaitLimitError(f"{what} took longer than {seconds:g} s")
    if threading.current_thread() is threading.main_thread():
        return _interruptible(function, seconds, error)
    return _abandonable(function, seconds, error)


def _interruptible(function: Callable[[], T], seconds: float, error: WaitLimitError) -> T:
    active = True

    def interrupt(_number: int, _frame: Any) -> None:
        if active:  # a timer that fires just as the call returns must not hit what comes after
            raise error

    previous = signal.signal(_SIGNAL, interrupt)
    timer = threading.Timer(seconds, signal.pthread_kill, (threading.main_thread().ident, _SIGNAL))
    timer.daemon = True
    timer.start()
    try:
        return function()
    finally:
        active = False
        timer.cancel()
        timer.join()
        signal.signal(_SIGNAL, previous)


def _abandonable(function: Callable[[], T], seconds: float, error: WaitLimitError) -> T:
    outcome: list[tuple[bool, Any]] = []

    def work() -> None:
        try:
            outcome.append((True, function()))
        except BaseException as raised:
            outcome.append((False, raised))

    thread = threading.Thread(target=work, daemon=True, name="callback")
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise error
    succeeded, value = outcome[0]
    if not succeeded:
        raise value
    return value  # type: ignore[no-any-return]
