"""Writes settings out: a commented config to start from, the reference page, and a run's own settings.

Everything is made from the models, so that no help text stands in two places.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

import yaml
from pydantic import BaseModel

from services.config.base import ConfigError, ConfigModel, nearest
from services.config.common import CommonRun
from services.config.fields import Setting, settings
from services.config.registry import ALGORITHMS, run_model
from services.config.run import LANGUAGE_ALGORITHMS, RunConfig
from services.config.smarl import SMARLRunConfig
from services.config.sweep import SweepConfig

_WIDTH = 100


def commented_config(algorithm: str) -> str:
    """A YAML text with every setting of a run of `algorithm`, its help, default and accepted values.

    It loads as it is; the names of models, data and functions in it are examples to replace. Raises ConfigError for
    an unknown algorithm.
    """
    if algorithm not in ALGORITHMS:
        near = nearest(algorithm, ALGORITHMS)
        hint = f"did you mean {near!r}? " if near else ""
        raise ConfigError(f"algorithm: {algorithm!r} is unknown; {hint}Known: {', '.join(ALGORITHMS)}")
    head = [
        f"# A run of {algorithm.upper()}. Every setting is here; what is left out has its default.",
        "# Relative paths start from the folder in which the command is run.",
    ]
    return "\n".join([*head, "", *_section_lines(run_model(algorithm), algorithm, "", "")])


def _section_lines(model: type[BaseModel], algorithm: str, indent: str, mark: str) -> Iterator[str]:
    """The lines of a section; `mark` is "# " inside a section that is only shown as a comment."""
    start = mark + indent
    for setting in settings(model, algorithm):
        yield from textwrap.wrap(
            setting.description, _WIDTH, initial_indent=f"{start}# ", subsequent_indent=f"{start}# "
        )
        if setting.section is None:
            note = f"# Accepted: {setting.accepts}."
            if not setting.required:
                note += f" Default: {_yaml(setting.default)}."
            yield from textwrap.wrap(
                note, _WIDTH, initial_indent=start, subsequent_indent=f"{start}#   ", break_on_hyphens=False
            )
            yield f"{start}{setting.key}: {_yaml(_written(setting, algorithm))}"
        elif setting.required or setting.default is not None or setting.key == "args":
            yield f"{start}{setting.key}:"
            yield from _section_lines(setting.section, algorithm, indent + "  ", mark)
        else:
            yield f"{start}{setting.key}: null"
            yield f"# {indent}{setting.key}:"
            yield from _section_lines(setting.section, algorithm, indent + "  ", "# ")
        if not indent and not mark:
            yield ""


def _written(setting: Setting, algorithm: str) -> Any:
    if setting.key == "algorithm":
        return algorithm
    examples = setting.info.examples
    return examples[0] if examples else setting.default


def _yaml(value: Any) -> str:
    """`value` as YAML on one line."""
    return (
        yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("\n").removesuffix("\n...")
    )


def dump_config(config: ConfigModel) -> str:
    """The settings of `config`, every one of them, as YAML that `load_config` reads back to an equal config."""
    plain = config.model_dump(mode="json")
    return yaml.safe_dump(_escaped(plain), sort_keys=False, allow_unicode=True)


def _escaped(value: Any) -> Any:
    # A text that holds `${` would be taken for an interpolation when it is read again.
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value


def config_reference() -> str:
    """The reference of all settings, as a Markdown page."""
    lines = [
        "# Configuration reference",
        "",
        "Made from the models in `services/config` by `make docs`; do not edit.",
        "",
        "A run is described by a YAML file. `greenroom config maac` prints one with all settings and comments.",
        "On the command line, `key=value` changes a setting: `args.discount=0.9`. A value may refer to another one,",
        "`${seed}`, or to the environment, `${oc.env:HOME}`; write `\\${` for a plain `${`. Relative paths, those of",
        "functions included, start from the folder in which the command is run.",
        "",
        "# Language-model agents: `algorithm: maac` or `iac`",
        "",
        *_run_reference(RunConfig, _args_reference()),
        "",
        "# DDPG agents: `algorithm: smarl`",
        "",
        *_run_reference(SMARLRunConfig, None),
        "",
        "# Sweeps",
        "",
        "`greenroom sweep` reads a run's configuration with one more section; see [sweeps.md](sweeps.md).",
        "",
        "## `sweep`",
        "",
        _summary(SweepConfig),
        "",
        *_table(settings(SweepConfig)),
    ]
    return "\n".join(lines) + "\n"


def _run_reference(run: type[CommonRun], args: list[str] | None) -> list[str]:
    """The sections of one kind of run; `args` replaces the plain table of its `args`."""
    lines = ["## The file", "", *_table([s for s in settings(run) if s.section is None])]
    for setting in settings(run):
        if setting.section is None:
            continue
        if setting.key == "args" and args is not None:
            lines += args
        elif setting.key != "eval_dataset":
            also = " and `eval_dataset`" if setting.key == "train_dataset" else ""
            lines += ["", f"## `{setting.key}`{also}", "", _summary(setting.section), ""]
            if setting.default is None and not setting.required:
                lines += ["Left out (null), it is off.", ""]
            lines += _table(settings(setting.section))
    return lines


def _args_reference() -> list[str]:
    """The settings of MAAC and IAC: first what they share, then what only one of them has or has otherwise."""
    rows = {name: {s.key: _row(s) for s in settings(model)} for name, model in LANGUAGE_ALGORITHMS.items()}
    first = next(iter(rows.values()))
    shared = [key for key, row in first.items() if all(r.get(key) == row for r in rows.values())]
    lines = ["", "## `args`", "", "Settings that both have:", "", *_HEAD, *(first[k] for k in shared)]
    for name, own in rows.items():
        lines += ["", f"### Only with `algorithm: {name}`", "", _summary(LANGUAGE_ALGORITHMS[name]), ""]
        lines += [*_HEAD, *(row for key, row in own.items() if key not in shared)]
    return lines


_HEAD = ["| setting | accepted | default | meaning |", "|---|---|---|---|"]


def _table(rows: list[Setting]) -> list[str]:
    return [*_HEAD, *(_row(setting) for setting in rows)]


def _row(setting: Setting) -> str:
    default = "needed" if setting.required else f"`{_yaml(setting.default)}`"
    cells = [f"`{setting.key}`", setting.accepts, default, setting.description]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _summary(model: type[BaseModel]) -> str:
    return " ".join((model.__doc__ or "").split())
