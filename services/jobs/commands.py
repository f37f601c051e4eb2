"""The commands of `greenroom` for runs on a cluster: submit, jobs, logs, stop.  Arguments in, exit status out."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli_errors import errors_for_people

if TYPE_CHECKING:
    from ray.job_submission import JobDetails

    from services.config import CommonRun
    from services.jobs.client import JobsClient

Address = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Of the cluster's job server; default: RAY_API_SERVER_ADDRESS, RAY_ADDRESS, or http://127.0.0.1:8265.",
    ),
]
JobId = Annotated[str, typer.Argument(metavar="ID", help="The job's id, as `greenroom jobs` lists it.")]
Timeout = Annotated[
    float | None, typer.Option(metavar="S", min=0, help="Longest wait in seconds; the job goes on after it.")
]

_STATUSES = {"SUCCEEDED": 0, "FAILED": 1, "STOPPED": 130}
_NOT_FOUND = 127


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    for command in (submit, jobs, logs, stop):
        app.command()(command)


def submit(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG.yaml", help="The run's configuration, in the working directory.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change, such as args.discount=0.9."),
    ] = None,
    address: Address = None,
    working_dir: Annotated[
        Path, typer.Option(metavar="DIR", help="What goes to the cluster: configuration and your code.")
    ] = Path(),
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="What of it stays here, as in .gitignore (whose files count, too); may be given several times.",
        ),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="RUN_DIR", help="Run folder to continue, as the cluster sees it: an absolute path."
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help="Environment variable of the job; may be given several times."
        ),
    ] = None,
    grace: Annotated[
        int,
        typer.Option(
            metavar="S", min=1, help="When stopped: how long the job may take for its checkpoint, in seconds."
        ),
    ] = 600,
    wait: Annotated[bool, typer.Option(help="Wait for the job's end and exit as it did.")] = True,
    follow: Annotated[
        bool | None, typer.Option("--follow/--no-follow", help="Show the job's logs; default: while waiting.")
    ] = None,
    timeout: Timeout = None,
) -> None:
    """Train on a Ray cluster: send the working directory, run `greenroom train` there, follow it.

    Exit status: 0 it succeeded, 1 it failed, 130 it was stopped.
    """
    with errors_for_people():
        from services.config import ConfigError, load_config
        from services.jobs.client import GRACE, JobsClient
        from services.jobs.package import check, look_into

        if follow and not wait:
            raise ConfigError(
                "--follow follows until the end; leave out --no-wait", "These do not go together"
            )
        folder, file, changes = (
            working_dir.expanduser().resolve(),
            _find(config, working_dir),
            overrides or [],
        )
        settings = load_config(file, changes)
        package = look_into(folder, exclude or [])
        relative = _relative(file, folder)
        check(package, relative, settings.model_dump())
        _tell_of_output(settings, resume)
        variables = _variables(env or [])
        command = ["greenroom", "train", relative, *changes]
        if resume is not None:
            command += ["--resume", _absolute(resume)]
        client = JobsClient(address)
        job_id = client.submit(
            shlex.join(command),
            folder,
            package.excludes,
            {**variables, GRACE: str(grace), "PATH": _path()},
            relative,
        )
        typer.echo(job_id)
        _say(f"sent {package} to {client.address}; the job runs: {shlex.join(command)}")
        status = _see_through(client, job_id, follow=follow is not False, timeout=timeout) if wait else 0
    raise typer.Exit(status)


def jobs(address: Address = None) -> None:
    """List the jobs of a cluster, the oldest first."""
    with errors_for_people():
        from services.jobs.client import JobsClient

        rows = [("ID", "STATUS", "STARTED", "SECONDS", "COMMAND")]
        for job in JobsClient(address).jobs():
            begun = (job.start_time or 0) / 1000
            ended = job.end_time / 1000 if job.end_time else time.time()
            started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(begun)) if begun else "-"
            took = f"{ended - begun:.0f}" if begun else "-"
            rows.append((str(job.submission_id), str(job.status), started, took, job.entrypoint))
        widths = [max(len(row[k]) for row in rows) for k in range(4)]
        for row in rows:
            typer.echo("  ".join([*(row[k].ljust(widths[k]) for k in range(4)), row[4]]))


def logs(
    job_id: JobId,
    address: Address = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on until the job ends, and exit as it did.")
    ] = False,
    timeout: Timeout = None,
) -> None:
    """Show what a job has written."""
    with errors_for_people():
        from services.jobs.client import JobsClient

        client = JobsClient(address)
        if follow:
            status = _see_through(client, job_id, follow=True, timeout=timeout)
        else:
            status = 0
            typer.echo(client.logs(job_id), nl=False)
    raise typer.Exit(status)


def stop(
    job_id: JobId,
    address: Address = None,
    wait: Annotated[bool, typer.Option("--wait", help="Until it has ended.")] = False,
    timeout: Timeout = None,
) -> None:
    """Stop a job: it ends the update that is running and leaves a checkpoint to continue from."""
    with errors_for_people():
        from services.jobs.client import JobsClient, grace_of

        client = JobsClient(address)
        job = client.info(job_id)
        if not client.stop(job_id):
            typer.echo(f"{job_id} has ended already: {client.info(job_id).status}")
            return
        grace = grace_of(job)
        if not wait:
            typer.echo(f"{job_id} is asked to stop; after {grace} s it is killed")
            return
        ended = client.wait(job_id, grace + 60 if timeout is None else timeout)
        typer.echo(f"{job_id} has ended: {ended.status}")


def _see_through(client: JobsClient, job_id: str, *, follow: bool, timeout: float | None) -> int:
    """Wait for the job's end; returns the exit status that stands for it."""
    try:
        if follow:
            job = client.follow(job_id, lambda text: typer.echo(text, nl=False), timeout)
        else:
            job = client.wait(job_id, timeout)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"no longer waiting; {job_id} goes on: `greenroom logs {job_id} --follow`, `greenroom stop {job_id}`"
        ) from None
    _say(f"{job_id} has ended: {job.status}")
    if job.status == "FAILED":
        _explain(job, logs_were_shown=follow)
    return _STATUSES[str(job.status)]


def _explain(job: JobDetails, *, logs_were_shown: bool) -> None:
    """Say why it failed, unless its logs did."""
    if job.driver_exit_code == _NOT_FOUND:
        _say(
            "`greenroom` is not installed on the head node, or not on the PATH with which `ray start` was called there"
        )
    elif job.message and not (logs_were_shown and job.driver_exit_code is not None):
        _say(job.message)


def _find(config: Path, working_dir: Path) -> Path:
    """The configuration, from here or from the working directory."""
    inside = working_dir.expanduser() / config
    return inside if not config.is_file() and inside.is_file() else config


def _relative(file: Path, folder: Path) -> str:
    from services.config import ConfigError

    path = file.resolve()
    if not path.is_relative_to(folder):
        raise ConfigError(
            f"{file} lies outside the working directory {folder}, of which alone a copy goes to the cluster: move it "
            "there, or give another --working-dir",
            "The job cannot be submitted",
        )
    return path.relative_to(folder).as_posix()


def _absolute(resume: str) -> str:
    from services.config import ConfigError

    if not resume.startswith("/"):
        raise ConfigError(
            f"--resume: {resume} is relative; give the absolute path that the run folder has on the cluster",
            "The job cannot be submitted",
        )
    return resume


def _variables(pairs: list[str]) -> dict[str, str]:
    from services.config import ConfigError

    for pair in pairs:
        if not pair.partition("=")[0].isidentifier() or "=" not in pair:
            raise ConfigError(f"--env: {pair!r} is not NAME=VALUE", "The job cannot be submitted")
    return dict(pair.split("=", 1) for pair in pairs)


def _path() -> str:
    """Where the job looks for `greenroom`: as a last resort where it is here, for nodes that share this file system
    but whose Ray was started by its full path."""
    return f"${{PATH}}:{Path(sys.executable).parent}"


def _tell_of_output(settings: CommonRun, resume: str | None) -> None:
    if resume is None and not Path(settings.output_dir).expanduser().is_absolute():
        _say(
            f"output_dir: {settings.output_dir} is relative, so the run folder will lie in the job's own copy of the "
            "working directory on the head node, which Ray may delete after the job; give output_dir=/PATH on a file "
            "system that the nodes share"
        )


def _say(text: str) -> None:
    """To standard error: standard output is the job's id and its logs."""
    typer.echo(text, err=True)
