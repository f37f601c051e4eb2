"""The `greenroom` command: arguments in, exit status out.  Everything it does is a call of something else."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from services.cli_errors import errors_for_people
from services.jobs import commands as jobs_commands
from services.sweep import commands as sweep_commands

app = typer.Typer(
    name="greenroom",
    help="Train cooperating agents: language models (MAAC, IAC), or DDPG agents whose number may change (SMARL).",
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
        str | None,
        typer.Option(
            help="Run folder, or the URI of its copy, to continue from the newest checkpoint.",
            metavar="RUN_DIR",
        ),
    ] = None,
    max_updates: Annotated[
        int | None,
        typer.Option(
            help="Stop after so many update rounds (SMARL: rounds of episodes), with a checkpoint to continue from.",
            min=1,
        ),
    ] = None,
) -> None:
    """Train the agents that a configuration describes."""
    with errors_for_people():
        from services.config import load_config
        from services.run_folder import RunFolder
        from services.storage import RunCopy, is_uri
        from services.summary import summarize
        from services.trainer import trainer_of

        changes = list(overrides or [])
        if resume is not None:
            if config is not None and "=" in str(config):  # `greenroom train --resume RUN key=value`
                changes, config = [str(config), *changes], None
            if is_uri(resume):
                where = [
                    change.removeprefix("output_dir=")
                    for change in changes
                    if change.startswith("output_dir=")
                ]
                resume = str(RunCopy(resume).fetch(where[-1] if where else "runs").path)
            config = config or RunFolder.open(resume).config_file
        if config is None:
            raise typer.BadParameter("give a CONFIG.yaml, or --resume RUN_DIR")
        settings = load_config(config, changes)
        with trainer_of(settings) as trainer:
            run = trainer.train(resume_from=resume, max_updates=max_updates)
        typer.echo(summarize(run))


@app.command()
def validate(config: ConfigFile, overrides: Overrides = None) -> None:
    """Check everything that can be checked before a model is loaded."""
    with errors_for_people():
        from services.config import load_config
        from services.validate import describe

        typer.echo(f"{config} is fine: {describe(load_config(config, overrides or []))}")


@app.command("config")
def show_config(
    algorithm: Annotated[str, typer.Argument(help="maac, iac or smarl.")],
) -> None:
    """Print a full configuration with every setting explained."""
    with errors_for_people():
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
    with errors_for_people():
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
    samples: Annotated[
        int | None, typer.Option(help="How many rows (default: all) or SMARL's episodes.", min=1)
    ] = None,
    num_agents: Annotated[
        int | None,
        typer.Option(
            help="SMARL: how many agents play, also a number never trained; default: as trained.", min=1
        ),
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="final, or step_...; default: final, else the newest.")
    ] = None,
) -> None:
    """Roll out a trained run's agents and print the mean rewards, or returns, as JSON."""
    with errors_for_people():
        import json

        from services.config import ConfigError, SMARLRunConfig, load_config
        from services.inference import evaluate_run
        from services.run_folder import RunFolder
        from services.smarl.evaluation import evaluate_team

        config = load_config(RunFolder.open(run_dir).config_file, overrides or [])
        if isinstance(config, SMARLRunConfig):
            if dataset is not None:
                raise ConfigError(
                    "--dataset: a SMARL run has no data set; its episodes come from its environment"
                )
            metrics = evaluate_team(
                run_dir, config, num_agents=num_agents, episodes=samples, checkpoint=checkpoint
            )
        else:
            if num_agents is not None:
                raise ConfigError("--num-agents: the number of language-model agents is fixed by training")
            metrics = evaluate_run(
                run_dir, overrides or [], dataset=dataset, num_samples=samples, checkpoint=checkpoint
            )
        typer.echo(json.dumps(metrics, indent=2))


@app.command()
def agents(
    run_dir: RunDir,
    add: Annotated[int, typer.Option(help="How many agents join.", min=0)] = 0,
    remove: Annotated[
        list[int] | None, typer.Option(help="Number of an agent that leaves; may be given several times.")
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="Ray cluster of the run; default: the one it was started on.")
    ] = None,
) -> None:
    """Change the team of a SMARL run while it trains, before its next episode."""
    with errors_for_people():
        from services.config import ConfigError
        from services.smarl.remote_control import change_team

        if not add and not remove:
            raise ConfigError("nothing to change: give --add COUNT, --remove NUMBER or both")
        count = change_team(run_dir, add=add, remove=remove or [], address=address)
        typer.echo(f"from the next episode on, {count} agents")


@app.command()
def scale(
    run_dir: RunDir,
    workers_per_agent: Annotated[
        int, typer.Option(help="How many generation workers each agent is to have.", min=1)
    ],
    address: Annotated[
        str | None, typer.Option(help="Ray cluster of the run; default: the one it was started on.")
    ] = None,
) -> None:
    """Change the number of generation workers of a language-model run while it trains, before its next update round."""
    with errors_for_people():
        from services.scaling import ask_for_workers

        ask_for_workers(run_dir, workers_per_agent, address=address)
        typer.echo(f"from the next update round on, {workers_per_agent} generation workers per agent")


jobs_commands.register(app)
sweep_commands.register(app)


def main() -> None:
    """Entry point of the `greenroom` command."""
    app()


if __name__ == "__main__":
    main()
