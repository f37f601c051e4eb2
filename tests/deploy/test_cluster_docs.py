"""docs/cluster.md tells what there is: its commands, settings and files exist."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from typer._click.exceptions import UsageError

from services.config import load_config
from tests.deploy.command_lines import ROOT, blocks, commands, understand

PAGE = (ROOT / "docs/cluster.md").read_text()
SHOWN = [
    words
    for text in blocks(PAGE, "sh")
    for words in commands(text, "greenroom", ".venv/bin/greenroom", "ray")
]
SETTINGS = [yaml.safe_load(text) for text in blocks(PAGE, "yaml")]
RUN = {"algorithm": "maac", "reward_func": "task.py:reward", "train_dataset": "rows.jsonl"} | {
    "agent_model": "model",
    "critic_model": "model",
}
TEAM = {"algorithm": "smarl", "environment": {"name": "ball_grid"}}


def test_commands_are_found() -> None:
    shown = {" ".join(words[:2]) for words in SHOWN}

    assert {"greenroom submit", "greenroom scale", "ray start", "ray up", "ray down"} <= shown
    assert len(SHOWN) > 20


@pytest.mark.parametrize("words", SHOWN, ids=" ".join)
def test_a_command_that_is_shown_can_be_called_so(words: list[str]) -> None:
    understand([words[0].rpartition("/")[2], *words[1:]])


@pytest.mark.parametrize(
    "line", ["greenroom submit run.yaml --follows", "ray start --heads", "greenroom trai"]
)
def test_a_command_that_is_wrong_would_be_found(line: str) -> None:
    with pytest.raises((UsageError, click.UsageError, ValueError)):
        understand(line.split())


def load(folder: Path, settings: dict[str, Any], changes: list[str]) -> None:
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump((TEAM if settings.get("algorithm") == "smarl" else RUN) | settings))
    load_config(file, changes)


def test_changes_of_settings_on_a_command_line_are_accepted(tmp_path: Path) -> None:
    changes = {
        word
        for words in SHOWN
        if words[0].endswith("greenroom") and words[1] in {"train", "submit"}
        for before, word in pairwise(words)
        if re.match(r"[\w.]+=", word) and before != "--env"
    }

    assert {"output_dir=/shared/runs", "engine.workers_per_agent=48"} <= changes
    load(tmp_path, {}, sorted(changes))


@pytest.mark.parametrize("settings", SETTINGS, ids=",".join)
def test_settings_that_are_shown_are_accepted(tmp_path: Path, settings: dict[str, Any]) -> None:
    load(tmp_path, settings, [])


def test_files_and_sections_that_are_named_are_there() -> None:
    files = set(re.findall(r"(?:deploy|docs|examples)/[\w./-]+\w/?|cluster\.yaml|Dockerfile", PAGE))
    links = set(re.findall(r"\]\(([^)#]*)(#[\w-]+)?\)", PAGE))

    assert {"deploy/kuberay/raycluster.yaml", "deploy/slurm/greenroom.sbatch", "cluster.yaml"} <= files
    for file in files:
        assert (ROOT / file).exists(), file
    for page, section in links:
        if page.startswith("http"):
            continue
        text = (ROOT / "docs" / page).read_text() if page else PAGE
        titles = {
            re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
            for title in re.findall(r"^#+ (.*)$", text, re.M)
        }
        assert not section or section[1:] in titles, (page, section)


def test_the_page_names_the_cuda_of_the_lock_file() -> None:
    lock = (ROOT / "requirements/cuda.txt").read_text()

    assert re.search(r"^nvidia-cuda-runtime==13\.", lock, re.MULTILINE)
    assert "CUDA 13" in PAGE
