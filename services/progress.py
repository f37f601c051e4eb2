"""Shows how far a run is: a bar in a terminal, now and then a line elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping

from tqdm import tqdm

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_LINES = 15.0


class Progress:
    """Progress over `unit`s, with a few of the newest numbers beside it."""

    def __init__(self, total: int, done: int, unit: str = "item") -> None:
        self._is_terminal = sys.stderr.isatty()
        self._bar = tqdm(
            total=total, initial=done, unit=unit, disable=not self._is_terminal, dynamic_ncols=True
        )
        self._total, self._done, self._unit = total, done, unit
        self._last_line = time.monotonic() - _SECONDS_BETWEEN_LINES

    def items(self, count: int) -> None:
        """`count` more of them are done."""
        self._done += count
        self._bar.update(count)

    def show(self, numbers: Mapping[str, str]) -> None:
        """Show `numbers`, name by name."""
        self._bar.set_postfix(numbers)
        now = time.monotonic()
        if not self._is_terminal and now - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = now
            told = ", ".join(f"{name} {number}" for name, number in numbers.items())
            logger.info("%s %d of %d: %s", self._unit, self._done, self._total, told)

    def close(self) -> None:
        self._bar.close()
