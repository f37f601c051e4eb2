"""Reads the rows to train and evaluate on, and checks that they can be used.

This module must not know what becomes of a row.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from services.config.base import ConfigError, nearest
from services.config.run import DataConfig

Rows = Sequence[Mapping[str, Any]]
"""Rows by number, starting from 0. A `datasets.Dataset` is one."""

_FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
_NO_ROWS = "holds no rows; at least one is needed"
_HUB_NAME = re.compile(r"^[\w.-]+(/[\w.-]+)?$")


def load_rows(source: DataConfig | str | Rows) -> Rows:
    """The rows of `source`: a described place, a path or hub name, a list of dicts, or a `datasets.Dataset`.

    Rows stay on disk where `datasets` keeps them there. Raises ConfigError if they cannot be read, if there are
    none, or if one is no mapping; the message names the place and the remedy.
    """
    rows = _read(DataConfig(path=source) if isinstance(source, str) else source)
    where = (
        f"{source.path!r}"
        if isinstance(source, DataConfig)
        else f"{source!r}"
        if isinstance(source, str)
        else ""
    )
    if len(rows) == 0:
        raise ConfigError(f"{where} {_NO_ROWS}".strip())
    if isinstance(rows, list):
        for index, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise ConfigError(
                    f"row {index} is a {type(row).__name__}, {repr(row)[:80]}; every row must be a dict, "
                    "such as {'prompt': '...'}"
                )
    return rows


def check_prompts(rows: Rows) -> None:
    """Refuses rows whose `prompt` is missing or no text; needed where no formatter makes the prompts.

    Raises ConfigError with the first such row's number and keys.
    """
    columns = getattr(rows, "column_names", None)
    if columns is not None and "prompt" in columns:
        # A data set on disk is read by column: no other field has to be decoded.
        prompts: Iterable[Any] = rows["prompt"]  # type: ignore[call-overload]
    else:
        prompts = (row.get("prompt") for row in rows)
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            continue
        row = rows[index]
        found = (
            "has no `prompt`"
            if "prompt" not in row
            else f"has a `prompt` that is {repr(prompt)[:80]}, not text"
        )
        raise ConfigError(
            f"row {index} {found} (its keys: {', '.join(map(str, row))}); give every row a text under `prompt`, "
            "or set `formatters` to make one"
        )


def _read(source: DataConfig | Rows) -> Rows:
    if not isinstance(source, DataConfig):
        countable = hasattr(source, "__len__") and hasattr(source, "__getitem__")
        if (
            isinstance(source, str | bytes | Mapping) and not hasattr(source, "column_names")
        ) or not countable:
            raise ConfigError(
                f"an object of type {type(source).__name__} is no data set; give a list of dicts, "
                "a datasets.Dataset, or a path"
            )
        if hasattr(source, "column_names") and isinstance(source.column_names, dict):
            raise ConfigError(
                f"a DatasetDict is no data set; pass one of its splits {', '.join(source.column_names)}"
            )
        return list(source) if isinstance(source, tuple) else source
    rows = _one_split(source, _load(source))
    return rows if source.limit is None else rows.select(range(min(source.limit, len(rows))))  # type: ignore[no-any-return]


def _load(source: DataConfig) -> Any:
    """What `datasets` makes of the place: a Dataset, or a DatasetDict of all splits where none is asked for."""
    import datasets

    path = Path(source.path).expanduser()
    with _explained(source):
        if path.is_file():
            if path.suffix not in _FORMATS:
                known = ", ".join(_FORMATS)
                raise ConfigError(
                    f"{source.path!r} ends in {path.suffix!r}; files that can be read end in {known}"
                )
            if path.stat().st_size == 0:
                raise ConfigError(f"{source.path!r} is empty; at least one row is needed")
            return datasets.load_dataset(_FORMATS[path.suffix], data_files=str(path), split=source.split)
        if path.is_dir():
            if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
                found = datasets.load_from_disk(str(path))
                return found if source.split is None else _named_split(source, source.split, found)
            return datasets.load_dataset(str(path), name=source.name, split=source.split)
        if path.suffix in _FORMATS or not _HUB_NAME.match(source.path):
            raise ConfigError(f"{source.path!r} does not exist (looked in {Path.cwd()})")
        return datasets.load_dataset(source.path, name=source.name, split=source.split)


@contextlib.contextmanager
def _explained(source: DataConfig) -> Iterator[None]:
    """Turns what `datasets` raises into a ConfigError that names the place."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        # `datasets` raises of nearly every kind, and puts the reason into the cause.
        reason = " ".join(str(error.__cause__ or error or type(error).__name__).split())[:300]
        if "corresponds to no data" in reason:
            raise ConfigError(f"{source.path!r} {_NO_ROWS}") from error
        if Path(source.path).expanduser().exists():
            raise ConfigError(f"{source.path!r} cannot be read: {reason}") from error
        raise ConfigError(
            f"{source.path!r} is neither a file nor a folder in {Path.cwd()}, and the Hugging Face hub does not "
            f"give it: {reason}"
        ) from error


def _named_split(source: DataConfig, split: str, found: Any) -> Any:
    """The rows of `split`, which may be a slice such as `train[:10%]`, out of what was saved to disk."""
    import datasets

    splits = found if isinstance(found, dict) else {str(found.split or "train"): found}
    name = split.partition("[")[0]
    if name not in splits:
        near = nearest(name, splits)
        hint = f"; did you mean {near!r}?" if near else ""
        raise ConfigError(f"{source.path!r} has no split {name!r}, only {', '.join(splits)}{hint}")
    (part,) = datasets.ReadInstruction.from_spec(split).to_absolute({name: len(splits[name])})
    return splits[name].select(range(part.from_ or 0, len(splits[name]) if part.to is None else part.to))


def _one_split(source: DataConfig, found: Any) -> Any:
    if not isinstance(found, dict):
        return found
    if "train" in found:
        return found["train"]
    if len(found) == 1:
        return next(iter(found.values()))
    raise ConfigError(f"{source.path!r} has the splits {', '.join(found)}; set `split` to one of them")
