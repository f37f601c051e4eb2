"""What every configuration model shares: strictness, error types, and how an unknown key is answered.

This module knows pydantic and nothing of any particular setting.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, ParamSpec, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError, core_schema

P = ParamSpec("P")
T = TypeVar("T")

UNKNOWN_KEY = "unknown_key"
INCONSISTENT = "inconsistent"
UNDECIDED = "undecided"
"""Type of the error of a field that could not be read because of another field's error."""


class ConfigError(ValueError):
    """A configuration, or what it points at, that cannot be used.

    `problems` holds one readable line for each thing found wrong, never only the first of them; the text of
    the exception is their list under `heading`.
    """

    def __init__(
        self, problems: str | Sequence[str], heading: str = "The configuration cannot be used"
    ) -> None:
        self.problems: list[str] = [problems] if isinstance(problems, str) else list(problems)
        self.heading = heading
        super().__init__("\n".join([f"{heading}:", *(f"  - {problem}" for problem in self.problems)]))

    def __reduce__(self) -> tuple[Any, ...]:
        # An exception is rebuilt from its text alone otherwise, and this one may cross a process border.
        return type(self), (self.problems, self.heading)


@dataclass
class Problems:
    """Gathers problems, so that the first one does not hide the others."""

    found: list[str] = field(default_factory=list)

    def add(self, key: str, text: str | None) -> None:
        line = f"{key}: {text}" if key else f"{text}"
        if text and line not in self.found:
            self.found.append(line)

    def collect(self, key: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """What `function` returns, or None if it raised ConfigError; its problems are then listed under `key`."""
        try:
            return function(*args, **kwargs)
        except ConfigError as error:
            for problem in error.problems:
                self.add(key, problem)
            return None

    def refuse(self) -> None:
        if self.found:
            raise ConfigError(self.found)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The name in `known` that `name` was most likely meant to be, or None if nothing is similar."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def key_of(model: type[BaseModel], field: str) -> str:
    """The name under which `field` is written in a file: its alias where it has one."""
    return model.model_fields[field].alias or field


def _message(text: str) -> str:
    # PydanticCustomError reads its message as a format string.
    return text.replace("{", "{{").replace("}", "}}")


def _again(error: ErrorDetails) -> InitErrorDetails:
    """An error that pydantic reported, in the form in which it can be raised once more."""
    kind: Any = error["type"]
    details = InitErrorDetails(type=kind, loc=error["loc"], input=error["input"])
    if kind in _STANDARD_ERRORS:
        if "ctx" in error:
            details["ctx"] = error["ctx"]
    else:
        details["type"] = PydanticCustomError(kind, error["msg"])
    return details


_STANDARD_ERRORS = frozenset(get_args(core_schema.ErrorType))


class ConfigModel(BaseModel):
    """A strict, unchangeable section of settings.

    An unknown key is an error that names the nearest known one. A subclass states its cross-field rules in
    `inconsistencies`; all that are broken are reported together, each under the field that has to change.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        coerce_numbers_to_str=True,
        serialize_by_alias=True,
    )

    elsewhere: ClassVar[dict[str, str]] = {}
    """Keys that a reader may expect here, and why there are none."""

    def inconsistencies(self) -> list[tuple[str, str]]:
        """Pairs of (field, what is wrong with it and how to mend it); empty when the fields go together."""
        return []

    @model_validator(mode="wrap")
    @classmethod
    def _name_unknown_keys(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(data)
        except ValidationError as error:
            found = error.errors(include_url=False)
            if not any(e["type"] == "extra_forbidden" and len(e["loc"]) == 1 for e in found):
                raise
            raise ValidationError.from_exception_data(
                cls.__name__, [_unknown(e, cls) if len(e["loc"]) == 1 else _again(e) for e in found]
            ) from None

    @model_validator(mode="after")
    def _refuse_inconsistencies(self) -> Self:
        found = self.inconsistencies()
        if found:
            raise ValidationError.from_exception_data(
                type(self).__name__,
                [
                    InitErrorDetails(
                        type=PydanticCustomError(INCONSISTENT, _message(text)),
                        loc=(key_of(type(self), field),),
                        input=getattr(self, field),
                    )
                    for field, text in found
                ],
            )
        return self


def _unknown(error: ErrorDetails, model: type[ConfigModel]) -> InitErrorDetails:
    if error["type"] != "extra_forbidden":
        return _again(error)
    key = str(error["loc"][-1])
    known = [key_of(model, field) for field in model.model_fields]
    near = nearest(key, known)
    if key in model.elsewhere:
        hint = model.elsewhere[key]
    elif near:
        hint = f"did you mean `{near}`?"
    else:
        hint = f"known are: {', '.join(known)}"
    return InitErrorDetails(
        type=PydanticCustomError(UNKNOWN_KEY, _message(f"unknown key; {hint}")),
        loc=error["loc"],
        input=error["input"],
    )
