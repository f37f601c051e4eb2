"""Random numbers that depend on counters alone.

Every draw of a run names its purpose, its agent and its step; the numbers follow from those and the run's seed.  They
are therefore the same however agents are spread over processes, and a resumed run needs nothing but its counters.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class Purpose(IntEnum):
    """What a stream is for; the numbers are part of what makes a run repeatable, so they never change."""

    INITIAL_PARAMETERS = 1
    REPLAY = 2
    RELAXATION = 3
    EXPLORATION = 4
    TARGETS = 5
    ENVIRONMENT = 6
    TARGET_TRAINING = 7
    EVALUATION = 8


def stream(seed: int, purpose: Purpose, *counters: int) -> np.random.Generator:
    """The generator of `purpose` at `counters`; equal arguments give equal numbers."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, purpose, *counters])))
