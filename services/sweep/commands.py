"""The command `greenroom sweep`.  Arguments in, exit status out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from services.cli_errors import errors_for_people


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command()(sweep)


def sweep(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG.yaml",
            help="A run's configuration with a section `sweep`; not needed with --resume.",
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change, such as sweep.num_samples=20."),
    ] = None,
    output_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where the sweep's folder is made; default: the run's output_dir."),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="SWEEP_DIR", help="Sweep to go on with: its trials that have not ended."),
    ] = None,
) -> None:
    """Train a run many times with different settings, and write down the best ones."""
    with errors_for_people():
        from services.config import ConfigError
        from services.sweep.report import BEST_FILE, PLOT_FILE, best_of
        from services.sweep.sweep import Sweep, load_sweep

        changes = list(overrides or [])
        if resume is not None:
            if config is not None or changes or output_dir is not None:
                raise ConfigError(
                    "--resume: a sweep goes on with the settings in its folder; give nothing else"
                )
            run = Sweep.open(resume)
        elif config is None:
            raise typer.BadParameter("give a CONFIG.yaml, or --resume SWEEP_DIR")
        else:
            if output_dir is not None:
                changes.append(f"output_dir={output_dir}")
            run = Sweep.create(*load_sweep(config, changes))
        outcomes = run.fit()
        best = best_of(outcomes, run.settings.mode)
        typer.echo("\n".join(["", f"sweep: {run.folder.path}", *(o.told() for o in outcomes), ""]))
        typer.echo(f"best: {best.told()}")
        typer.echo(f"greenroom train {run.folder.path / BEST_FILE}")
        typer.echo(f"picture: {run.folder.path / PLOT_FILE}")
