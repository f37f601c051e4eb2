"""Ctrl-C and SIGTERM as a wish to stop, granted at a moment that loses nothing."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self


class StopSignals:
    """Within this context, SIGINT and SIGTERM raise KeyboardInterrupt at once, or are noted while `defer()` holds.

    A second signal does not wait.  Outside the main thread, where no handler can be set, it does nothing.
    """

    def __init__(self, defer: Callable[[], bool]) -> None:
        self._defer = defer
        self._previous: dict[signal.Signals, Any] = {}
        self.asked: str | None = None
        """Why to stop, once a signal was noted."""

    def raise_if_asked(self) -> None:
        """Grant the wish."""
        if self.asked:
            raise KeyboardInterrupt(self.asked)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = {
                number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)
            }
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: Any) -> None:
        name = signal.Signals(number).name
        if self._defer() and self.asked is None:
            self.asked = f"stopped by {name}"
            return
        raise KeyboardInterrupt(f"stopped by {name}")
