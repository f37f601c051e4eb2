"""The search space: which settings and distributions it takes, and what it says of others."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sweep_runs import SMARL, write

from services.config import CommonRun, ConfigError, load_config, parse_config
from services.config.sweep import SweepConfig
from services.sweep.space import Parameter, plain_settings, read_space, with_values
from services.sweep.sweep import load_sweep

LANGUAGE = {
    "algorithm": "iac",
    "agent_model": "a",
    "critic_model": "b",
    "reward_func": "m:f",
    "train_dataset": "d.jsonl",
    "args": {"num_turns": 1},
}


def smarl(**changes: Any) -> CommonRun:
    return parse_config({**SMARL, **changes})


def space(run: CommonRun | None = None, **parameters: Any) -> list[Parameter]:
    return read_space(SweepConfig(space=parameters), run or smarl())


def problems(run: CommonRun | None = None, **parameters: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        space(run, **parameters)
    return caught.value.problems


def test_a_name_without_a_dot_is_one_of_args_and_others_are_found_by_their_path() -> None:
    found = space(
        discount={"uniform": [0.9, 1]},
        **{
            "args.tau": {"choice": [0.1, 1]},
            "seed": {"int": [0, 3]},
            "workers.envs_per_runner": {"grid": [1, 2]},
            "environment.options.pay": {"loguniform": [1, 10]},
        },
    )
    assert [(p.name, p.key, p.kind, p.values) for p in found] == [
        ("discount", "args.discount", "uniform", (0.9, 1.0)),
        ("args.tau", "args.tau", "choice", (0.1, 1)),
        ("seed", "seed", "int", (0, 3)),
        ("workers.envs_per_runner", "workers.envs_per_runner", "grid", (1, 2)),
        ("environment.options.pay", "environment.options.pay", "loguniform", (1.0, 10.0)),
    ]


def test_an_unknown_setting_is_told_with_the_nearest_known_one() -> None:
    for name, near in {
        "value_los_coef": "value_loss_coef",
        "engine.max_model_length": "engine.max_model_len",
        "learnr.micro_batch_tokens": "learner.micro_batch_tokens",
    }.items():
        found = problems(parse_config(LANGUAGE), **{name: {"uniform": [0, 1]}})
        assert found == [f"sweep.space.{name}: there is no such setting; did you mean `{near}`?"]


def test_settings_of_another_algorithm_are_unknown() -> None:
    assert "there is no such setting" in problems(value_loss_coef={"uniform": [0, 1]})[0]
    assert "there is no such setting" in problems(parse_config(LANGUAGE), tau={"uniform": [0, 1]})[0]


def test_what_the_sweep_decides_itself_cannot_be_searched() -> None:
    assert problems(run_name={"choice": ["a", "b"]}) == [
        "sweep.space.run_name: cannot be searched: a run is named after its trial"
    ]


def test_what_a_checkpoint_is_made_for_cannot_be_searched_by_pbt() -> None:
    sizes = {"hidden_sizes": {"choice": [[8], [16]]}}
    assert len(space(**sizes)) == 1
    with pytest.raises(ConfigError, match="hidden_sizes: cannot change in the middle of a run"):
        read_space(SweepConfig(space=sizes, scheduler="pbt"), smarl())


def test_one_setting_under_two_names_is_refused() -> None:
    found = problems(discount={"choice": [1]}, **{"args.discount": {"choice": [1]}})
    assert found == ["sweep.space.args.discount: the same setting as discount; leave out one of them"]


@pytest.mark.parametrize(
    ("distribution", "told"),
    [
        (0.5, "0.5 is no distribution; write {uniform: [0, 1]}"),
        ({"uniform": [0, 1], "int": [0, 1]}, "is no distribution"),
        ({"unifrom": [0, 1]}, "there is no distribution 'unifrom'; did you mean 'uniform'?"),
        ({"uniform": 0.5}, "uniform: 0.5 is no list of values"),
        ({"choice": []}, "choice: [] is no list of values"),
        ({"uniform": [1, 0]}, "uniform: 1 is not below 0; the least comes first"),
        ({"uniform": [0, "1"]}, "must be two numbers"),
        ({"uniform": [0, 0.5, 1]}, "must be two numbers"),
        ({"int": [0, 0.5]}, "int: [0, 0.5] must be two whole numbers"),
        ({"loguniform": [0, 1]}, "loguniform: 0 has no logarithm"),
    ],
)
def test_a_distribution_that_is_none_is_told(distribution: Any, told: str) -> None:
    (line,) = problems(discount=distribution)
    assert line.startswith("sweep.space.discount: ")
    assert told in line


@pytest.mark.parametrize(
    ("name", "distribution", "told"),
    [
        ("discount", {"uniform": [0.9, 1.1]}, "args.discount: 1.1 is not accepted"),
        ("batch_size", {"uniform": [1, 8]}, "args.batch_size: 3.67"),
        ("replay", {"choice": ["shared", "mine"]}, "args.replay: 'mine' is not accepted"),
        ("hidden_sizes", {"grid": [[8], [0]]}, "every hidden layer needs at least one unit"),
        ("agents", {"int": [0, 2]}, "agents"),
    ],
)
def test_a_value_that_the_setting_refuses_is_told_with_what_it_accepts(
    name: str, distribution: Any, told: str
) -> None:
    (line,) = problems(**{name: distribution})
    assert line.startswith(f"sweep.space.{name}: {next(iter(distribution))} holds a value that is refused: ")
    assert told in line


def test_values_may_contradict_the_files_but_not_one_another() -> None:
    apart = {"exploration_noise": {"uniform": [0.01, 0.02]}}
    (line,) = problems(**apart)
    assert (
        "none of 64 combinations makes a run: args.exploration_noise_end: exceeds exploration_noise" in line
    )
    assert len(space(**apart, exploration_noise_end={"uniform": [0, 0.01]})) == 2


def test_all_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, {"space": {"discount": {"uniform": [0, 1]}}, "num_sample": 3}, args={"tau": 5})
    with pytest.raises(ConfigError) as caught:
        load_sweep(path)
    assert [line.partition(":")[0] for line in caught.value.problems] == ["sweep.num_sample", "args.tau"]
    assert "did you mean `num_samples`?" in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"search": "optuna", "scheduler": "pbt"}, "sweep.search: optuna does not go with scheduler=pbt"),
        (
            {"search": "optuna", "space": {"discount": {"grid": [1]}}},
            "sweep.search: optuna cannot try a grid",
        ),
        ({"scheduler": "pbt", "num_samples": 1}, "sweep.num_samples: 1 is no population"),
        ({"space": {}}, "sweep.space: {} is not accepted"),
    ],
)
def test_settings_that_do_not_go_together_are_told(
    tmp_path: Path, settings: dict[str, Any], told: str
) -> None:
    path = write(tmp_path, {"space": {"discount": {"uniform": [0, 1]}}, **settings})
    with pytest.raises(ConfigError) as caught:
        load_sweep(path)
    assert told in str(caught.value)


def test_a_runs_file_without_the_section_and_a_sweeps_file_given_to_train_are_told(tmp_path: Path) -> None:
    path = write(tmp_path, {"space": {"discount": {"uniform": [0, 1]}}})
    with pytest.raises(ConfigError, match="sweep: unknown key; only `greenroom sweep` reads it"):
        load_config(path)
    (tmp_path / "run.yaml").write_text("algorithm: smarl\nenvironment: ball_grid\n")
    with pytest.raises(ConfigError, match="sweep: missing"):
        load_sweep(tmp_path / "run.yaml")


def test_settings_change_on_the_command_line(tmp_path: Path) -> None:
    path = write(tmp_path, {"space": {"discount": {"uniform": [0, 1]}}})
    sweep, run = load_sweep(path, ["sweep.num_samples=3", "seed=5", "sweep.space.tau={choice: [0.1]}"])
    assert (sweep.num_samples, run.seed, list(sweep.space)) == (3, 5, ["discount", "tau"])


unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
numbers = st.floats(1e-3, 1e3, allow_nan=False)


@unhurried
@given(low=numbers, factor=st.floats(1.01, 100), kind=st.sampled_from(["uniform", "loguniform"]), at=numbers)
def test_what_is_drawn_or_clipped_lies_in_the_range(low: float, factor: float, kind: str, at: float) -> None:
    (parameter,) = space(**{"environment.options.pay": {kind: [low, low * factor]}})
    low, high = parameter.values
    drawn = [parameter.drawn(random.Random(0)), parameter.domain().sample(), parameter.mutation().sample()]
    for value in [*drawn, parameter.clipped(at), *parameter.probes()]:
        assert low * (1 - 1e-9) <= value <= high * (1 + 1e-9)
    assert parameter.clipped(drawn[0]) == drawn[0]


@unhurried
@given(st.integers(-5, 5), st.integers(1, 4))
def test_whole_numbers_include_both_ends(low: int, span: int) -> None:
    (parameter,) = space(**{"environment.options.pay": {"int": [low, low + span]}})
    drawn = {int(value) for value in parameter.domain().sample(size=400)}
    assert drawn == set(range(low, low + span + 1))
    assert parameter.clipped(low + span + 1) == low + span


@unhurried
@given(
    st.dictionaries(
        st.sampled_from(
            ["args.discount", "args.tau", "seed", "environment.options.deep.pay", "wandb_config.name"]
        ),
        st.one_of(st.integers(), st.text()),
    )
)
def test_values_are_put_where_their_keys_say_and_nothing_else_changes(values: dict[str, Any]) -> None:
    plain = plain_settings(smarl())
    changed = with_values(plain, values)
    assert plain == plain_settings(smarl())

    def at(key: str) -> Any:
        here: Any = changed
        for part in key.split("."):
            here = here[part]
        return here

    assert {key: at(key) for key in values} == values
    untouched = {key: value for key, value in plain.items() if not any(k.startswith(key) for k in values)}
    assert untouched.items() <= changed.items()
