"""The commands that a text shows, and whether `greenroom` and `ray` would understand them."""

from __future__ import annotations

import platform
import re
import shlex
import shutil
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import typer

from services.cli import app

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Ray Serve's, which comes along
    from ray.scripts.scripts import cli as ray_command

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
_ENDS = {"|", "||", "&&", "&", ";", ">", "2>&1"}


def tool(name: str) -> str:
    """The path of a program that requirements/dev.txt brings, on the platforms for which there is one."""
    path = shutil.which(name, path=BIN) or shutil.which(name)
    if path is None:
        if platform.machine() == "x86_64":
            pytest.fail(f"{name} is missing: make install")
        pytest.skip(f"{name} is not there for this machine")
    return path


def blocks(markdown: str, *languages: str) -> list[str]:
    """The contents of the fenced blocks in any of `languages`, also of those in a list."""
    found = re.findall(r"^ *```(\w+)\n(.*?)^ *```", markdown, flags=re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(text) for language, text in found if language in languages]


def commands(shell: str, *programs: str) -> list[list[str]]:
    """The words of each command that calls one of `programs`, without what a shell does before and after it."""
    found = []
    for line in shell.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"\w+=.*", words[0]):
            words.pop(0)
        if words and words[0] in programs:
            end = next((k for k, word in enumerate(words) if word in _ENDS), len(words))
            found.append(words[:end])
    return found


def understand(words: list[str]) -> None:
    """Parse a command line as its program would, without running it; raises what the program would complain of."""
    command: Any = {"greenroom": typer.main.get_command(app), "ray": ray_command}[words[0]]
    name, rest = words[0], list(words[1:])
    while hasattr(command, "commands"):
        if not rest or rest[0] not in command.commands:
            raise ValueError(f"{name} has no command {rest[:1]}")
        name = rest.pop(0)
        command = command.commands[name]
    command.make_context(name, rest)
