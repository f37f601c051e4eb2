"""Which weights a worker holds."""

from __future__ import annotations


class StaleWeightsError(RuntimeError):
    """A worker was asked to sample with a weight version that it does not hold."""
