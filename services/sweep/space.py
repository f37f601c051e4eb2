"""The search space: from `sweep.space` to parameters, and from their values to a run's configuration.

Owns what a distribution is and which settings it may stand for.  Everything that a trial could refuse is found here,
before one is started.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_origin

from pydantic import ValidationError

from services.config import CommonRun, ConfigError, explain, parse_config
from services.config.base import INCONSISTENT, UNDECIDED, Problems, nearest
from services.config.fields import walk
from services.config.registry import run_model
from services.config.sweep import SweepConfig

_RANGES = ("uniform", "loguniform", "int")
_LISTS = ("choice", "grid")
_FORM = "write {uniform: [0, 1]}, {loguniform: [1.0e-4, 1.0e-2]}, {int: [1, 8]}, {choice: [a, b]} or {grid: [a, b]}"
_TAKEN = {
    "algorithm": "a sweep compares runs of one algorithm",
    "output_dir": "the sweep's folder holds all its runs",
    "run_name": "a run is named after its trial",
    "checkpoint_interval": "it is `sweep.checkpoint_interval` that counts",
    "keep_checkpoints": "the sweep keeps what it needs",
}
"""Settings that a sweep decides itself."""
_IN_CHECKPOINTS = {
    "agents",
    "agent_model",
    "critic_model",
    "critics",
    "tokenizer",
    "environment.name",
    "model_config.critic_value_head_hidden_dim",
    "model_config.value_head_hidden_dim",
    *(
        f"args.{name}"
        for name in (
            "num_agents",
            "use_separate_critic",
            "critic_value_head_hidden_dim",
            "value_head_hidden_dim",
            "hidden_sizes",
            "replay",
            "target_hidden_size",
            "target_attention",
        )
    ),
}
"""Settings that a checkpoint is made for: a run with others cannot go on from it."""
_DRAWS = 64


@dataclass(frozen=True, slots=True)
class Parameter:
    """A setting that is searched."""

    name: str
    """As the file calls it."""
    key: str
    """The dotted key of the setting in a run's configuration."""
    kind: str
    values: tuple[Any, ...]
    """Both ends of a range, or what there is to choose from."""

    def domain(self) -> Any:
        """What Ray Tune draws from."""
        from ray import tune

        if self.kind == "grid":
            return tune.grid_search(list(self.values))
        if self.kind == "choice":
            return tune.choice(list(self.values))
        low, high = self.values
        if self.kind == "int":
            return tune.randint(low, high + 1)
        return tune.loguniform(low, high) if self.kind == "loguniform" else tune.uniform(low, high)

    def mutation(self) -> Any:
        """What PBT changes it by: a list, in which it goes to a neighbour, or a range."""
        return list(self.values) if self.kind in _LISTS else self.domain()

    def clipped(self, value: Any) -> Any:
        """`value`, or the nearest one inside the range: PBT multiplies without looking."""
        if self.kind in _LISTS:
            return value
        return min(max(value, self.values[0]), self.values[1])

    def probes(self) -> tuple[Any, ...]:
        """Values that tell whether the setting accepts all: of a range, both ends and something odd between them."""
        if self.kind in _LISTS:
            return self.values
        low, high = self.values
        return (low, high) if self.kind == "int" else (low, high, low + 0.381966 * (high - low))

    def drawn(self, rng: random.Random) -> Any:
        """Any value."""
        if self.kind in _LISTS:
            return rng.choice(self.values)
        return rng.randint(*self.values) if self.kind == "int" else rng.uniform(*self.values)


def read_space(sweep: SweepConfig, run: CommonRun) -> list[Parameter]:
    """The parameters of a sweep over `run`.

    Raises:
        ConfigError: lists every unknown setting, distribution that is none, and value that a setting refuses.
    """
    problems = Problems()
    plain = plain_settings(run)
    found: dict[str, Parameter] = {}
    for name, distribution in sweep.space.items():
        key = problems.collect(f"sweep.space.{name}", _key_of, name, str(plain["algorithm"]))
        parsed = problems.collect(f"sweep.space.{name}", _distribution, distribution)
        if key is None or parsed is None:
            continue
        if key in found:
            problems.add(
                f"sweep.space.{name}", f"the same setting as {found[key].name}; leave out one of them"
            )
            continue
        if sweep.scheduler == "pbt" and key in _IN_CHECKPOINTS:
            problems.add(f"sweep.space.{name}", "cannot change in the middle of a run, as scheduler=pbt does")
        found[key] = Parameter(name, key, *parsed)
        problems.add(f"sweep.space.{name}", _refusal(plain, found[key]))
    problems.refuse()
    parameters = list(found.values())
    problems.add("sweep.space", _contradiction(plain, parameters, sweep.seed))
    problems.refuse()
    return parameters


def plain_settings(run: CommonRun) -> dict[str, Any]:
    """Every setting of `run`, as a file would hold it."""
    return run.model_dump(mode="json")


def with_values(plain: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings `plain` with `values`, dotted key by dotted key."""
    changed = copy.deepcopy(dict(plain))
    for key, value in values.items():
        *sections, name = key.split(".")
        here = changed
        for section in sections:
            if here.get(section) is None:
                here[section] = {}
            here = here[section]
        here[name] = value
    return changed


def _key_of(name: str, algorithm: str) -> str:
    """The dotted key that `name` stands for."""
    known = dict(walk(algorithm))
    key = f"args.{name}" if f"args.{name}" in known else name
    if key in _TAKEN:
        raise ConfigError(f"cannot be searched: {_TAKEN[key]}")
    if key in known:
        return key
    section = key.rpartition(".")[0]
    while section:
        # Below `environment.options` and the like, names are free.
        if section in known and get_origin(known[section].info.annotation) is dict:
            return key
        section = section.rpartition(".")[0]
    short = {full.removeprefix("args."): full for full in known}
    near = nearest(name, [*short, *known])
    if near is None:
        names = {full.rpartition(".")[2]: full for full in reversed(known)}
        near = names.get(nearest(name.rpartition(".")[2], names) or "")
    raise ConfigError("there is no such setting" + (f"; did you mean `{near}`?" if near else ""))


def _distribution(given: Any) -> tuple[str, tuple[Any, ...]]:
    """Kind and values of a distribution."""
    if not isinstance(given, dict) or len(given) != 1:
        raise ConfigError(f"{given!r} is no distribution; {_FORM}")
    kind, values = next(iter(given.items()))
    if kind not in (*_RANGES, *_LISTS):
        near = nearest(str(kind), [*_RANGES, *_LISTS])
        raise ConfigError(
            f"there is no distribution {kind!r}; " + (f"did you mean {near!r}?" if near else _FORM)
        )
    if not isinstance(values, list) or not values:
        raise ConfigError(f"{kind}: {values!r} is no list of values; {_FORM}")
    if kind in _LISTS:
        return kind, tuple(values)
    return kind, _range(kind, values)


def _range(kind: str, values: Sequence[Any]) -> tuple[Any, ...]:
    wanted = int if kind == "int" else (int, float)
    if len(values) != 2 or any(isinstance(v, bool) or not isinstance(v, wanted) for v in values):
        what = "whole numbers" if kind == "int" else "numbers"
        raise ConfigError(f"{kind}: {list(values)} must be two {what}, the least and the greatest")
    low, high = values
    if low >= high:
        raise ConfigError(f"{kind}: {low} is not below {high}; the least comes first")
    if kind == "loguniform" and low <= 0:
        raise ConfigError(f"loguniform: {low} has no logarithm; both ends must be greater than 0")
    return (low, high) if kind == "int" else (float(low), float(high))


def _refusal(plain: Mapping[str, Any], parameter: Parameter) -> str | None:
    """Why the setting refuses a value of the distribution.  What depends on other settings is not looked at."""
    algorithm = str(plain["algorithm"])
    model = run_model(algorithm)
    for value in parameter.probes():
        try:
            model.model_validate(with_values(plain, {parameter.key: value}))
        except ValidationError as error:
            if all(e["type"] in (INCONSISTENT, UNDECIDED) for e in error.errors(include_url=False)):
                continue
            return f"{parameter.kind} holds a value that is refused: {explain(error, model, algorithm)[0]}"
    return None


def _contradiction(plain: Mapping[str, Any], parameters: Sequence[Parameter], seed: int) -> str | None:
    """Why no combination of values makes a run; None where some do."""
    rng = random.Random(seed)
    refused: ConfigError | None = None
    for _ in range(_DRAWS):
        try:
            parse_config(with_values(plain, {p.key: p.drawn(rng) for p in parameters}))
            return None
        except ConfigError as error:
            refused = error
    assert refused is not None
    return f"none of {_DRAWS} combinations makes a run: {refused.problems[0]}"
