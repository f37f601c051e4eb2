"""Rows to train on: the places they are read from, and how unusable ones are answered. Nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub.constants
import pytest

from services.config import ConfigError, DataConfig
from services.data import check_prompts, load_rows

ROWS = [{"prompt": "one", "n": 1}, {"prompt": "two", "n": 2}, {"prompt": "three", "n": 3}]


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)


def write_lines(path: str, rows: list[Any]) -> str:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def as_list(rows: Any) -> list[dict[str, Any]]:
    return [dict(rows[index]) for index in range(len(rows))]


def refusal_of(source: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_rows(source)
    (problem,) = caught.value.problems
    return problem


def test_files_of_every_format_give_the_same_rows() -> None:
    write_lines("a.jsonl", ROWS)
    Path("a.json").write_text(json.dumps(ROWS))
    Path("a.csv").write_text("prompt,n\none,1\ntwo,2\nthree,3\n")
    datasets.Dataset.from_list(ROWS).to_parquet("a.parquet")
    for name in ("a.jsonl", "a.json", "a.csv", "a.parquet"):
        assert as_list(load_rows(DataConfig(path=name))) == ROWS, name


def test_limit_and_split_choose_rows() -> None:
    write_lines("a.jsonl", ROWS)
    assert as_list(load_rows(DataConfig(path="a.jsonl", limit=2))) == ROWS[:2]
    assert as_list(load_rows(DataConfig(path="a.jsonl", limit=99))) == ROWS
    assert as_list(load_rows(DataConfig(path="a.jsonl", split="train[1:]"))) == ROWS[1:]


def test_a_folder_of_files_gives_its_train_split_or_its_only_one() -> None:
    write_lines("both/train.jsonl", ROWS[:2])
    write_lines("both/test.jsonl", ROWS[2:])
    assert as_list(load_rows("both")) == ROWS[:2]
    assert as_list(load_rows(DataConfig(path="both", split="test"))) == ROWS[2:]
    write_lines("only/test.jsonl", ROWS)
    assert as_list(load_rows("only")) == ROWS


def test_folders_saved_by_datasets_are_read() -> None:
    whole = datasets.Dataset.from_list(ROWS)
    whole.save_to_disk("one")
    assert as_list(load_rows("one")) == ROWS
    datasets.DatasetDict({"train": whole, "test": whole.select([2])}).save_to_disk("several")
    assert as_list(load_rows("several")) == ROWS
    assert as_list(load_rows(DataConfig(path="several", split="test"))) == ROWS[2:]
    assert as_list(load_rows(DataConfig(path="several", split="train[:2]", limit=1))) == ROWS[:1]
    datasets.DatasetDict({"a": whole, "b": whole}).save_to_disk("unnamed")
    assert "has the splits a, b; set `split`" in refusal_of("unnamed")
    assert "has no split 'tests', only train, test; did you mean 'test'?" in refusal_of(
        DataConfig(path="several", split="tests")
    )


def test_rows_given_in_python_are_taken_as_they_are() -> None:
    assert load_rows(ROWS) is ROWS
    whole = datasets.Dataset.from_list(ROWS)
    assert load_rows(whole) is whole


def test_what_cannot_be_read_is_named_with_the_reason() -> None:
    assert "'nope.jsonl' does not exist" in refusal_of("nope.jsonl")
    assert "'a/b/c' does not exist" in refusal_of("a/b/c")
    assert "'some/name' is neither a file nor a folder" in refusal_of("some/name")
    assert "hub does not give it" in refusal_of("some/name")
    Path("a.txt").write_text("x")
    assert "end in .jsonl, .json, .csv, .parquet" in refusal_of("a.txt")
    Path("empty.jsonl").write_text("")
    assert "'empty.jsonl' is empty" in refusal_of("empty.jsonl")
    Path("broken.jsonl").write_text('{"prompt": "a"\n')
    assert "'broken.jsonl' cannot be read: JSON parse error" in refusal_of("broken.jsonl")
    write_lines("a.jsonl", ROWS)
    assert 'Unknown split "test"' in refusal_of(DataConfig(path="a.jsonl", split="test"))
    Path("hollow").mkdir()
    assert "'hollow' cannot be read" in refusal_of("hollow")


def test_a_data_set_without_rows_is_refused() -> None:
    assert refusal_of([]) == "holds no rows; at least one is needed"
    Path("head.csv").write_text("prompt,n\n")
    assert refusal_of("head.csv") == "'head.csv' holds no rows; at least one is needed"


def test_what_is_no_data_set_is_refused() -> None:
    assert "row 1 is a str, 'two'; every row must be a dict" in refusal_of([ROWS[0], "two"])
    assert "type int is no data set" in refusal_of(3)
    assert "type dict is no data set" in refusal_of({"prompt": ["a"]})
    whole = datasets.Dataset.from_list(ROWS)
    assert "one of its splits train, test" in refusal_of(
        datasets.DatasetDict({"train": whole, "test": whole})
    )


@pytest.mark.parametrize("kind", ["list", "dataset"])
def test_a_row_without_a_text_prompt_is_named_by_number_and_keys(kind: str) -> None:
    def rows(values: list[dict[str, Any]]) -> Any:
        return values if kind == "list" else datasets.Dataset.from_list(values)

    check_prompts(rows(ROWS))
    with pytest.raises(ConfigError, match=r"row 0 has no `prompt` \(its keys: question, n\)"):
        check_prompts(rows([{"question": "a", "n": 1}]))
    with pytest.raises(
        ConfigError, match=r"row 1 has a `prompt` that is None, not text \(its keys: prompt, n\)"
    ):
        check_prompts(rows([ROWS[0], {"prompt": None, "n": 1}]))
    with pytest.raises(ConfigError, match=r"row 0 has a `prompt` that is 7, not text.*formatters"):
        check_prompts(rows([{"prompt": 7}]))
