"""How long it took to replace what was lost, said in the log: one wording for engines, learners and SMARL's actors."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


@contextmanager
def recovering(what: str, cause: BaseException, plan: str) -> Iterator[None]:
    """Tell that `what` was lost, and once the body has replaced it, after how many seconds it was back.

    A body that raises says itself what went wrong.
    """
    logger.warning("%s was lost (%s); %s", what, cause, plan)
    began = time.monotonic()
    yield
    logger.warning("%s is back after %.1f s", what, time.monotonic() - began)
