"""The `greenroom` command: arguments in, exit status out.  Everything it does is a call of something else."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="greenroom",
    help="Train cooperating language-model agents with multi-agent actor-critic (MAAC and IAC).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change, such as args.discount=0.9."),
]
ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="The run's configuration.")]
RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run folder that `greenroom train` made.")]


@app.command()
def train(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="CONFIG.yaml", help="The run's configuration; not needed with --resume."),
    ] = None,
    overrides: Overrides = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="Run folder to continue from its newest checkpoint.", metavar="RUN_DIR"),
    ] = None,
    max_updates: Annotated[
        int | None,
        typer.Option(help="Stop after so many update rounds, with a checkpoint to continue from.", min=1),
    ] = None,
) -> None:
    """Train the agents that a configuration describes."""
    with _errors_for_people():
        from services.config import load_config
        from services.run_folder import RunFolder
        from services.summary import summarize
        from services.trainer import TRAINERS

        changes = list(overrides or [])
        if resume is not None:
            if config is not None and "=" in str(config):  # `greenroom train --resume RUN key=value`
                changes, config = [str(config), *changes], None
            config = config or RunFolder.open(resume).config_file
        if config is None:
            raise typer.BadParameter("give a CONFIG.yaml, or --resume RUN_DIR")
        settings = load_config(config, changes)
        with TRAINERS[settings.algorithm].from_config(settings) as trainer:
            run = trainer.train(resume_from=resume, max_updates=max_updates)
        typer.echo(summarize(run))


@app.command()
def validate(config: ConfigFile, overrides: Overrides = None) -> None:
    """Check everything that can be checked before a model is loaded."""
    with _errors_for_people():
        from services.config import load_config
        from services.validate import validate as check

        checked = check(load_config(config, overrides or []))
        typer.echo(
            f"{config} is fine: {len(checked.train_rows)} training rows, {len(checked.models.agents)} agents"
        )


@app.command("config")
def show_config(
    algorithm: Annotated[str, typer.Argument(help="maac or iac.")],
) -> None:
    """Print a full configuration with every setting explained."""
    with _errors_for_people():
        from services.config import ALGORITHMS, ConfigError, commented_config

        if algorithm not in ALGORITHMS:
            raise ConfigError(f"algorithm: {algorithm!r} is not known; known are {', '.join(ALGORITHMS)}")
        typer.echo(commented_config(algorithm))


@app.command()
def generate(
    run_dir: RunDir,
    prompt: Annotated[list[str], typer.Option(help="What the agents read; may be given several times.")],
    agent: Annotated[int | None, typer.Option(help="Only this agent; default: all.", min=0)] = None,
    samples: Annotated[int, typer.Option("--samples", "-n", help="Completions per prompt.", min=1)] = 1,
    greedy: Annotated[bool, typer.Option(help="Take the likeliest token every time.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.", min=0)] = 0,
    checkpoint: Annotated[
        str | None, typer.Option(help="final, or step_...; default: final, else the newest.")
    ] = None,
) -> None:
    """Sample from a trained run's agents; prompts are taken as they are, without the run's formatters."""
    with _errors_for_people():
        from services.inference import generate_from_run

        for answer in generate_from_run(
            run_dir, prompt, agent=agent, samples=samples, greedy=greedy, seed=seed, checkpoint=checkpoint
        ):
            typer.echo(
                f"--- agent {answer.agent_idx}, prompt {answer.prompt_idx + 1}, sample {answer.sample_idx + 1}"
            )
            typer.echo(answer.text)


@app.command()
def evaluate(
    run_dir: RunDir,
    overrides: Overrides = None,
    dataset: Annotated[
        str | None,
        typer.Option(help="Rows to evaluate on; default: the run's eval_dataset, else its train_dataset."),
    ] = None,
    samples: Annotated[int | None, typer.Option(help="How many rows; default: all.", min=1)] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="final, or step_...; default: final, else the newest.")
    ] = None,
) -> None:
    """Roll out a trained run's agents on a data set and print the mean rewards as JSON."""
    with _errors_for_people():
        import json

        from services.inference import evaluate_run

        metrics = evaluate_run(
            run_dir, overrides or [], dataset=dataset, num_samples=samples, checkpoint=checkpoint
        )
        typer.echo(json.dumps(metrics, indent=2))


@contextmanager
def _errors_for_people() -> Iterator[None]:
    """What a user can mend is told in one message, without a traceback, and ends with status 1 (2: bad input)."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    for noisy in ("httpx", "ray", "filelock", "datasets"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    try:
        yield
    except KeyboardInterrupt as stop:
        _tell(stop, f"Stopped: {stop or 'interrupted'}")
        raise typer.Exit(130) from None
    except Exception as error:
        bad_input, expected = _kinds()
        if isinstance(error, bad_input):
            _tell(error, str(error))
            raise typer.Exit(2) from None
        if isinstance(error, expected):
            _tell(error, f"{type(error).__name__}: {error}")
            raise typer.Exit(1) from None
        raise


def _kinds() -> tuple[tuple[type[Exception], ...], tuple[type[Exception], ...]]:
    """Errors that are the input's, and errors whose message says all that a user needs."""
    from actors.generation_pool import WorkerLostError
    from actors.limits import WaitLimitError
    from actors.rewards import CallbackError
    from actors.rollout import RolloutError
    from learners.optimiser import NonFiniteLossError
    from learners.snapshot import WeightSyncError
    from services.checkpoint import CheckpointError
    from services.config import ConfigError
    from services.learner_group import LearnerLostError
    from services.metrics import MetricsError
    from services.placement import PlacementError
    from services.run_folder import RunFolderError

    return (ConfigError, RunFolderError), (
        CallbackError,
        CheckpointError,
        LearnerLostError,
        MetricsError,
        NonFiniteLossError,
        PlacementError,
        RolloutError,
        WaitLimitError,
        WeightSyncError,
        WorkerLostError,
    )


def _tell(error: BaseException, text: str) -> None:
    typer.echo("\n".join([text, *getattr(error, "__notes__", [])]), err=True)


def main() -> None:
    """Entry point of the `greenroom` command."""
    app()


if __name__ == "__main__":
    main()
