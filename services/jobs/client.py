"""A thin layer over Ray's job client: limits on every wait, errors that say what to do, logs as they come.

Knows jobs, not what runs in them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import requests
from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobSubmissionClient

from actors.limits import WaitLimitError
from services.config.base import ConfigError
from services.jobs.address import job_server, only_arguments_count, unreachable

_REQUEST_S = (10.0, 60.0)
"""To connect and send, and to be answered."""
_UPLOAD_S = (1800.0, 300.0)
_POLL_S = 0.5
_SILENCE_S = 10.0
"""How often a job without output is asked whether it still runs."""
GRACE = "RAY_JOB_STOP_WAIT_TIME_S"
"""Environment variable of a job: how long Ray waits between SIGTERM and SIGKILL, in whole seconds."""
_RAYS_GRACE_S = 3
_YOUNG_S = 90.0
"""How long a head node may answer without being able to start a job: some seconds after its start."""

logger = logging.getLogger(__name__)


class JobServerError(RuntimeError):
    """The job server failed, or the connection with it."""


class JobsClient:
    """The jobs of the cluster at `address`.

    Raises:
        ConfigError: there is no job server, or it lets nobody in without a token.
    """

    def __init__(self, address: str | None = None) -> None:
        for talkative in ("modules.job.sdk", "modules.dashboard_sdk"):
            logging.getLogger(f"ray.dashboard.{talkative}").setLevel(logging.WARNING)
        logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
        self.address = job_server(address)
        self._ray = self._connect()

    def submit(
        self, entrypoint: str, working_dir: Path, excludes: list[str], env: Mapping[str, str], name: str
    ) -> str:
        """Pack and send `working_dir`, and have `entrypoint` run in the copy; returns the job's id."""
        environment = {"working_dir": str(working_dir), "excludes": list(excludes), "env_vars": dict(env)}
        end = time.monotonic() + _YOUNG_S
        with self._telling("sending the job"):
            while True:
                try:
                    return str(
                        self._ray.submit_job(
                            entrypoint=entrypoint, runtime_env=environment, metadata={"job_name": name}
                        )
                    )
                except RuntimeError as error:
                    if "No available agent" not in str(error) or time.monotonic() > end:
                        raise
                    logger.info("the cluster has only just been started and takes no jobs yet; trying again")

    def jobs(self) -> list[JobDetails]:
        """All jobs that were submitted, the oldest first."""
        with self._telling("listing jobs"):
            found = [job for job in self._ray.list_jobs() if job.submission_id]
        return sorted(found, key=lambda job: job.start_time or 0)

    def info(self, job_id: str) -> JobDetails:
        """What Ray knows of a job.

        Raises:
            ConfigError: there is no such job.
        """
        with self._telling(f"asking for job {job_id}", job_id):
            return self._ray.get_job_info(job_id)

    def logs(self, job_id: str) -> str:
        """Everything that a job has written."""
        self.info(job_id)  # of an unknown job, Ray returns the logs of nothing
        with self._telling(f"reading the logs of {job_id}", job_id):
            return str(self._ray.get_job_logs(job_id))

    def stop(self, job_id: str) -> bool:
        """Ask a job to stop; returns whether it was still running."""
        with self._telling(f"stopping {job_id}", job_id):
            return bool(self._ray.stop_job(job_id))

    def wait(self, job_id: str, timeout_s: float | None = None) -> JobDetails:
        """Until a job has ended.

        Raises:
            WaitLimitError: it had not after `timeout_s` seconds; the job goes on.
        """
        started = time.monotonic()
        while not (job := self.info(job_id)).status.is_terminal():
            _check(started, timeout_s, job_id, str(job.status))
            time.sleep(_POLL_S)
        return job

    def follow(self, job_id: str, write: Callable[[str], None], timeout_s: float | None = None) -> JobDetails:
        """Hand on what a job writes until it has ended.

        Raises:
            WaitLimitError: it had not after `timeout_s` seconds; the job goes on.
        """
        started = time.monotonic()
        self.info(job_id)
        with self._telling(f"following {job_id}", job_id):
            asyncio.run(self._hand_on(job_id, write, started, timeout_s))
        left = None if timeout_s is None else timeout_s - (time.monotonic() - started)
        return self.wait(job_id, left)

    async def _hand_on(
        self, job_id: str, write: Callable[[str], None], started: float, timeout_s: float | None
    ) -> None:
        lines = self._ray.tail_job_logs(job_id)

        async def next_chunk() -> str | None:
            return await anext(lines, None)

        coming = asyncio.ensure_future(next_chunk())
        ended = False
        try:
            while True:
                done, _ = await asyncio.wait(
                    {coming}, timeout=_SILENCE_S if timeout_s is None else min(_SILENCE_S, timeout_s)
                )
                if done:
                    chunk = coming.result()
                    if chunk is None:
                        return
                    write(chunk)
                    coming = asyncio.ensure_future(next_chunk())
                elif ended:
                    return
                else:
                    # A server that is gone may leave the connection silent.  The last lines of a job that has ended
                    # have one more period to come.
                    ended = (await asyncio.to_thread(self.info, job_id)).status.is_terminal()
                _check(started, timeout_s, job_id, "running")
        finally:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)
            await lines.aclose()

    def _connect(self) -> JobSubmissionClient:
        try:
            with only_arguments_count():
                return _LimitedClient(self.address)
        except AuthenticationError as error:
            # Only a server that asks for the token is shown it.
            refusal = error
            try:
                if maybe_enable_token_auth_if_token_available(warn_if_disabled=False):
                    with only_arguments_count():
                        return _LimitedClient(self.address)
            except AuthenticationError as second:
                refusal = second
            raise ConfigError(
                f"{self.address} lets nobody in without the cluster's token ({_first_line(refusal)}): copy "
                "~/.ray/auth_token from the head machine, or put it into RAY_AUTH_TOKEN, and set RAY_AUTH_MODE=token",
                "The cluster cannot be used",
            ) from None
        except (ConnectionError, requests.RequestException, RuntimeError) as error:
            raise unreachable(self.address, "job server", _first_line(error)) from None

    @contextmanager
    def _telling(self, what: str, job_id: str | None = None) -> Iterator[None]:
        """Failures of Ray's client as errors that say what failed."""
        try:
            yield
        except (ConfigError, WaitLimitError):
            raise
        except (OSError, RuntimeError, AuthenticationError) as error:  # requests' errors are OSErrors
            if job_id is not None and "status code 404" in str(error):
                known = [str(job.submission_id) for job in self.jobs()][-5:]
                raise ConfigError(
                    f"there is no job {job_id} at {self.address}; the last ones are {', '.join(known) or 'none'}",
                    "The job cannot be found",
                ) from None
            raise JobServerError(
                f"{what} failed ({self.address}): {_first_line(error)}. Jobs that run go on; see `greenroom jobs`"
            ) from error


class _LimitedClient(JobSubmissionClient):  # type: ignore[misc]
    """Ray's client, which by itself waits for an answer for ever."""

    def _do_request(self, method: str, endpoint: str, **options: Any) -> Any:
        limits = _UPLOAD_S if method == "PUT" else _REQUEST_S
        return super()._do_request(method, endpoint, timeout=limits, **options)


def grace_of(job: JobDetails) -> int:
    """How long Ray waits for a job that is asked to stop, in seconds."""
    value = ((job.runtime_env or {}).get("env_vars") or {}).get(GRACE)
    return int(value) if value else _RAYS_GRACE_S


def _check(started: float, timeout_s: float | None, job_id: str, status: str) -> None:
    if timeout_s is not None and time.monotonic() - started >= timeout_s:
        raise WaitLimitError(
            f"waited {timeout_s:.0f} s for job {job_id}, which is {status} still and goes on; follow it with "
            f"`greenroom logs {job_id} --follow`, end it with `greenroom stop {job_id}`"
        )


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
