"""Reads the models themselves: which settings there are, what each accepts, in words.

The error messages, the commented config and the reference are made of this; it must not know any setting by name
but `args`, whose model depends on the algorithm.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from services.config.base import key_of
from services.config.common import CommonRun
from services.config.registry import ALGORITHMS, run_model

_WORDS: dict[Any, str] = {bool: "true or false", int: "whole number", float: "number", str: "text"}
_LIMITS: list[tuple[type, str, str]] = [
    (Ge, "ge", "at least"),
    (Gt, "gt", "greater than"),
    (Le, "le", "at most"),
    (Lt, "lt", "less than"),
]


@dataclass(frozen=True)
class Setting:
    """One field of a model, under the name that a file uses."""

    key: str
    model: type[BaseModel]
    info: FieldInfo
    section: type[BaseModel] | None
    """The model of the section below it, if it is one."""

    @property
    def description(self) -> str:
        return self.info.description or ""

    @property
    def accepts(self) -> str:
        """The accepted values in words, such as "whole number, at least 1, or null"."""
        extra = self.info.json_schema_extra
        if isinstance(extra, dict) and "accepts" in extra:
            return str(extra["accepts"])
        if self.section is not None:
            nullable = type(None) in get_args(self.info.annotation)
            return "section of settings or null" if nullable else "section of settings"
        return _in_words(self.info)

    @property
    def required(self) -> bool:
        return self.info.is_required()

    @property
    def default(self) -> Any:
        """The default value; meaningless where the field is required or a section."""
        return self.info.get_default(call_default_factory=True, validated_data={})


def settings(model: type[BaseModel], algorithm: str | None = None) -> list[Setting]:
    """The fields of `model` in their order; `algorithm` decides the section of `args`."""
    found = []
    # What all runs share comes after what a reader looks for first.
    for name, info in sorted(model.model_fields.items(), key=lambda item: item[0] in CommonRun.model_fields):
        section = _section_of(info.annotation)
        if issubclass(model, CommonRun) and name == "args":
            section = ALGORITHMS.get(algorithm or "", section)
        found.append(Setting(key_of(model, name), model, info, section))
    return found


def walk(algorithm: str | None = None) -> Iterator[tuple[str, Setting]]:
    """Every setting of a run with its full dotted key, sections before what is in them."""
    yield from _walk(run_model(algorithm), "", algorithm)


def _walk(model: type[BaseModel], prefix: str, algorithm: str | None) -> Iterator[tuple[str, Setting]]:
    for setting in settings(model, algorithm):
        yield prefix + setting.key, setting
        if setting.section is not None:
            yield from _walk(setting.section, f"{prefix}{setting.key}.", algorithm)


def _section_of(annotation: Any) -> type[BaseModel] | None:
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _in_words(info: FieldInfo) -> str:
    members = _members(info.annotation)
    words = [word for member in members if member is not type(None) for word in _choices(member)]
    limits = [
        f"{text} {getattr(limit, attribute)}"
        for limit in info.metadata
        for kind, attribute, text in _LIMITS
        if isinstance(limit, kind)
    ]
    nullable = type(None) in members
    if limits:
        return ", ".join([_any_of(words), *limits, *(["or null"] if nullable else [])])
    return _any_of([*words, "null"] if nullable else words)


def _any_of(words: list[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _members(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return (annotation,)


def _choices(annotation: Any) -> list[str]:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _choices(get_args(annotation)[0])
    if origin is Literal:
        return [f"`{choice}`" for choice in get_args(annotation)]
    if origin is list:
        return [f"list of {_any_of(_choices(get_args(annotation)[0]))}"]
    return [_WORDS.get(annotation, str(annotation))]
