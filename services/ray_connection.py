"""Joins this process to a Ray cluster, or starts one on this machine; says at once when a named cluster is gone.

Ray is imported late: how to authenticate with a cluster is read from the environment when it is.
"""

from __future__ import annotations

import logging
import os
import socket
from urllib.parse import urlsplit

from services.config.base import ConfigError

_KNOCK_S = 10.0
_PORTS = {"https": 443, "http": 80}

logger = logging.getLogger(__name__)


def connect() -> None:
    """Join the cluster that `RAY_ADDRESS` names, else the one that `ray start` left running on this machine, else start
    Ray here; keep a connection that exists.

    Raises:
        ConfigError: nobody listens at `RAY_ADDRESS`.
    """
    import ray

    # A call with several results is checked by one of them; Ray would print its error for each of the others.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    if not ray.is_initialized():
        ray.init(
            address=_address(),
            include_dashboard=False,
            logging_level=logging.WARNING,
            # Engines and libraries in actors chatter; their errors arrive as exceptions.
            log_to_driver=False,
        )


def _address() -> str | None:
    """What to hand to `ray.init`, which would look for a cluster that is gone for minutes."""
    named = os.environ.get("RAY_ADDRESS")
    if named in ("auto", "local"):
        return None  # Ray reads it by itself
    if named:
        try:
            knock(named)
        except (ValueError, ConnectionError) as error:
            raise ConfigError(
                f"RAY_ADDRESS={named}: {error}. Start a cluster there with `ray start --head`, name another as "
                "RAY_ADDRESS=HOST:PORT, or unset RAY_ADDRESS to start Ray on this machine",
                "The Ray cluster cannot be reached",
            ) from None
        return None
    from ray._private.services import find_bootstrap_address

    last = find_bootstrap_address(None)
    if last:
        try:
            knock(last)
        except (ValueError, ConnectionError):
            logger.warning(
                "the Ray cluster last started on this machine, at %s, is gone: starting Ray here", last
            )
            return "local"
    return None


def knock(address: str) -> None:
    """Find out, within seconds, whether anybody listens at `address`: HOST:PORT or a URL.

    Raises:
        ValueError: `address` names no host and port.
        ConnectionError: nobody listens there.
    """
    parts = urlsplit(address if "://" in address else f"//{address}")
    port = parts.port or _PORTS.get(parts.scheme)
    if not parts.hostname or port is None:
        raise ValueError("it names no host and port")
    try:
        socket.create_connection((parts.hostname, port), timeout=_KNOCK_S).close()
    except OSError as error:
        raise ConnectionError(str(error)) from None
