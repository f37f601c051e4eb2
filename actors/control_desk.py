"""Where wishes to a running training are left: `greenroom scale` leaves them, the training loop takes them up.

Knows nothing of the loop; the newest wish of a kind replaces an older one.
"""

from __future__ import annotations


class ControlDesk:
    """Serves one run, as a named actor."""

    def __init__(self) -> None:
        self._wishes: dict[str, int] = {}

    def ask(self, name: str, value: int) -> None:
        """Leave the wish that setting `name` be `value`."""
        self._wishes[name] = value

    def take(self) -> dict[str, int]:
        """The wishes left since the last call."""
        taken, self._wishes = self._wishes, {}
        return taken
