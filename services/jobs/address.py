"""Where a cluster's job server is: the URL, from what a user or the environment says.

Knows addresses, not jobs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from services.config.base import ConfigError
from services.ray_connection import knock

DEFAULT = "http://127.0.0.1:8265"
"""Where `ray start --head` puts it."""
_ENVIRONMENT = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")  # in Ray's own order
_REPLY_S = 10.0
_HEADING = "No Ray job server can be reached"
_FORM = "write http://HOST:PORT"


def job_server(address: str | None) -> str:
    """The URL of the job server at `address`, else at what the environment names, else at `DEFAULT`.

    An `http://` or `https://` URL is the server's own; anything else is an address of the cluster, as RAY_ADDRESS may
    hold, of which Ray is asked where the server is.

    Raises:
        ConfigError: nobody listens there.
    """
    source = "--address"
    if address is None:
        source = next((name for name in _ENVIRONMENT if os.environ.get(name)), "the default address")
        address = os.environ.get(source) or DEFAULT
    if address.startswith(("http://", "https://")):
        _knock(address, source)
        return address.rstrip("/")
    if address == "auto":
        address = _local_cluster(source)
    _knock(address, source)
    if "://" not in address and _speaks_http(address):
        return f"http://{address}"
    return _ask_ray(address, source)


def unreachable(address: str, source: str, reason: object) -> ConfigError:
    """What to tell of an `address` at which there is no job server."""
    return ConfigError(
        f"{address} ({source}): {reason}. Start a cluster on the head machine with `ray start --head "
        "--dashboard-host 0.0.0.0`, or give another address with --address http://HEAD:8265 or RAY_API_SERVER_ADDRESS",
        _HEADING,
    )


def _local_cluster(source: str) -> str:
    """The address of the cluster that was last started on this machine."""
    from ray._private.services import canonicalize_bootstrap_address

    address = canonicalize_bootstrap_address("auto")
    if not address:
        raise unreachable("auto", source, "no cluster runs on this machine")
    return str(address)


def _knock(address: str, source: str) -> None:
    """Ray tries a cluster that is gone for minutes; a closed port tells at once."""
    try:
        knock(address)
    except ValueError as error:
        raise ConfigError(f"{address!r} ({source}) is no address: {error}; {_FORM}", _HEADING) from None
    except ConnectionError as error:
        raise unreachable(address, source, error) from None


def _speaks_http(address: str) -> bool:
    """Whether `address`, given without a scheme, is the job server itself and not the cluster's own port."""
    import requests

    try:
        reply = requests.get(f"http://{address}/api/version", timeout=_REPLY_S)
    except requests.RequestException:
        return False
    return reply.status_code != 404


def _ask_ray(address: str, source: str) -> str:
    from ray._private.authentication.authentication_token_setup import (
        maybe_enable_token_auth_if_token_available,
    )
    from ray.dashboard.utils import get_address_for_submission_client

    # Unlike the job server, the cluster's own port does not say that it wants a token: it does not answer.
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    try:
        with only_arguments_count():
            return str(get_address_for_submission_client(address))
    except Exception as error:  # of many kinds, all of which mean the same here
        raise unreachable(address, source, str(error).strip() or type(error).__name__) from None


@contextmanager
def only_arguments_count() -> Iterator[None]:
    """Ray lets its environment variables win over an address that it is given; not in here."""
    held = {name: os.environ.pop(name) for name in _ENVIRONMENT if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(held)
