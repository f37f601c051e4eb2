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
    """Progress over items, with the newest reward, update round and generation speed."""

    def __init__(self, total_items: int, done_items: int) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._bar = tqdm(
            total=total_items,
            initial=done_items,
            unit="item",
            disable=not self._is_terminal,
            dynamic_ncols=True,
        )
        self._total, self._done = total_items, done_items
        self._last_line = time.monotonic() - _SECONDS_BETWEEN_LINES

    def items(self, count: int) -> None:
        """`count` more items have been rolled out."""
        self._done += count
        self._bar.update(count)

    def update(self, report: Mapping[str, float], update_round: int) -> None:
        """An update round is done."""
        reward, speed = report.get("turn_1/reward_mean", 0.0), report.get("tokens_per_second", 0.0)
        self._bar.set_postfix({"update": update_round, "reward": f"{reward:.3f}", "tok/s": f"{speed:.0f}"})
        now = time.monotonic()
        if not self._is_terminal and now - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = now
            logger.info(
                "item %d of %d, update %d: reward %.3f, %.0f tokens/s",
                self._done,
                self._total,
                update_round,
                reward,
                speed,
            )

    def close(self) -> None:
        self._bar.close()
