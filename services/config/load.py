"""Reads a run's settings from a YAML file and `key=value` overrides, and explains what is wrong with them.

Relative paths inside a config, those of callables included, start from the current working directory. This module
must not open anything that a config points at.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import AnyNode, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from services.config.base import INCONSISTENT, UNDECIDED, UNKNOWN_KEY, ConfigError, ConfigModel, nearest
from services.config.common import CommonRun
from services.config.fields import Setting, settings, walk
from services.config.registry import RUNS, run_model
from services.config.run import RunConfig

_SHOWN = 80
"""Longest value that a message repeats, in characters."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> CommonRun:
    """The settings in the YAML file `path`, changed by `overrides`.

    An override is `key=value` with a dotted key (`args.discount=0.9`, `agents[1]=path`) and a YAML value. Values may
    refer to others by OmegaConf interpolation (`${seed}`, `${oc.env:HOME}`). Raises ConfigError, which lists
    everything that is wrong, with the full key, the value and what is accepted.
    """
    return parse_config(read_settings(path, overrides), f"{path} cannot be used")


def read_settings(path: str | Path, overrides: Sequence[str] = ()) -> dict[Any, Any]:
    """What the YAML file `path` says, changed by `overrides`, not looked at yet."""
    heading = f"{path} cannot be used"
    tree = _read_yaml(Path(path), heading)
    for override in overrides:
        _override(tree, override, heading)
    try:
        plain = OmegaConf.to_container(tree, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {_first_line(error)}", heading) from None
    assert isinstance(plain, dict)
    return plain


def parse_config(values: dict[Any, Any], heading: str = "The configuration cannot be used") -> CommonRun:
    """The settings in the plain mapping `values`. Raises ConfigError, which lists everything that is wrong."""
    algorithm = values.get("algorithm")
    model = run_model(algorithm)
    try:
        return model.model_validate(values)
    except ValidationError as error:
        known = algorithm if isinstance(algorithm, str) and algorithm in RUNS else None
        raise ConfigError(explain(error, model, known), heading) from None


def explain(
    error: ValidationError, model: type[BaseModel] = RunConfig, algorithm: str | None = None
) -> list[str]:
    """One readable line for each setting that `error` is about, in its order.

    `model` is what was validated; `algorithm` decides what `args` of a run accepts.
    """
    lines: dict[str, str] = {}
    for problem in error.errors(include_url=False):
        # A union reports each of its branches; the setting is named once.
        key, line = _explain_one(problem, model, algorithm)
        lines.setdefault(key, line)
    return [line for line in lines.values() if line]


def _explain_one(problem: ErrorDetails, model: type[BaseModel], algorithm: str | None) -> tuple[str, str]:
    key, setting = "", None
    here: type[BaseModel] | None = model
    rest = list(problem["loc"])
    while rest and here is not None:
        found = {s.key: s for s in settings(here, algorithm)}
        if rest[0] not in found:
            break
        setting = found[str(rest.pop(0))]
        key = f"{key}.{setting.key}" if key else setting.key
        here = setting.section
    if problem["type"] == UNDECIDED:
        return key, ""
    if problem["type"] == UNKNOWN_KEY:
        key = ".".join([key, *map(str, rest)]) if key else ".".join(map(str, rest))
        if not issubclass(model, CommonRun):
            return key, f"{key}: {problem['msg']}"
        return key, f"{key}: {_unknown_key(key, here or model, algorithm, problem['msg'])}"
    if problem["type"] == "invalid_key":
        name = str(rest[-1])
        return name, f"{name}: unknown key; keys are text"
    for index in rest:
        key += f"[{index}]" if isinstance(index, int) else ""
    if problem["type"] in (INCONSISTENT, "value_error") or setting is None:
        return key, f"{key}: {problem['msg']}"
    if problem["type"] == "missing":
        return key, f"{key}: missing. {_help(setting)}"
    return key, f"{key}: {_shown(problem['input'])} is not accepted. {_help(setting)}"


def _help(setting: Setting) -> str:
    return f"Accepted: {setting.accepts}. ({setting.description})"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _unknown_key(key: str, model: type[BaseModel], algorithm: str | None, message: str) -> str:
    """What to say of a key that `model` does not have: the model's own words, or the nearest one anywhere."""
    parent, _, name = key.rpartition(".")
    if issubclass(model, ConfigModel) and name in model.elsewhere:
        return message
    known = [full for full, _ in walk(algorithm)]
    siblings = {full.rpartition(".")[2]: full for full in known if full.rpartition(".")[0] == parent}
    near = nearest(name, siblings)
    # Nearly the same name beside it is likelier meant than the same name elsewhere, which is likelier than any other.
    if near and difflib.SequenceMatcher(None, name, near).ratio() > 0.9:
        return f"unknown key; did you mean `{siblings[near]}`?"
    same = [full for full in known if full.rpartition(".")[2] == name]
    if same:
        return f"unknown key; did you mean {' or '.join(f'`{full}`' for full in same)}?"
    if near:
        return f"unknown key; did you mean `{siblings[near]}`?"
    names = {full.rpartition(".")[2]: full for full in reversed(known)}
    near = nearest(name, names)
    if near:
        return f"unknown key; did you mean `{names[near]}`?"
    where = f"in `{parent}`" if parent else "here"
    return f"unknown key; known {where} are: {', '.join(siblings)}"


def _read_yaml(path: Path, heading: str) -> DictConfig:
    if not path.is_file():
        what = "it is a folder" if path.is_dir() else "there is no such file"
        raise ConfigError(f"{what} (looked in {Path.cwd()}); give the path of a YAML file", heading)
    try:
        tree = OmegaConf.load(path)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(f"{place}not valid YAML: {_first_line(error)}", heading) from None
    except (yaml.YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        raise ConfigError(f"not valid YAML: {_first_line(error)}", heading) from None
    except OSError as error:
        # OmegaConf says so of a file that holds a bare number or text.
        raise ConfigError(f"cannot be read as settings: {_first_line(error)}", heading) from None
    if not isinstance(tree, DictConfig):
        raise ConfigError("holds a list; settings are written as `key: value`", heading)
    return tree


def _override(tree: DictConfig, override: str, heading: str) -> None:
    key, sign, text = override.partition("=")
    key = key.strip()
    if not sign or not key:
        raise ConfigError(f"override {override!r}: write key=value, such as args.discount=0.9", heading)
    section = key.partition(".")[0]
    if section in ("train_dataset", "eval_dataset") and section != key:
        # A data set given as a plain text means its path, also where an override adds to it.
        given = tree._get_node(section)
        if isinstance(given, AnyNode) and isinstance(given._value(), str):
            tree[section] = {"path": given._value()}
    try:
        value = OmegaConf.create(f"value: {text}") if text.strip() else OmegaConf.create({"value": None})
        OmegaConf.update(tree, key, value._get_node("value"), force_add=True)
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, IndexError, TypeError) as error:
        raise ConfigError(f"override {override!r}: {_first_line(error)}", heading) from None


def _first_line(error: BaseException) -> str:
    if isinstance(error, yaml.MarkedYAMLError):
        return "; ".join(part for part in (error.context, error.problem) if part)
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
