"""The Dockerfile without an engine: linted, and each step of its CPU target run as far as that is possible here."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.deploy.command_lines import BIN, ROOT, tool

Step = tuple[str, str]
APT, USER, MAKE, SMOKE = "apt-get update", "useradd", "make", "greenroom --help"


def steps(text: str) -> dict[str, list[Step]]:
    """Target -> its instructions and their arguments, on one line each."""
    text = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE)
    targets: dict[str, list[Step]] = {}
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        if not line.strip():
            continue
        instruction, rest = line.split(maxsplit=1)
        if instruction == "FROM":
            targets[rest.split(" AS ")[1]] = []
        targets[list(targets)[-1]].append((instruction, re.sub(r"--mount=\S+\s+", "", rest)))
    return targets


TARGETS = steps((ROOT / "Dockerfile").read_text())


def runs(*targets: str) -> list[str]:
    return [rest for target in targets for instruction, rest in TARGETS[target] if instruction == "RUN"]


def run_of(kind: str) -> str:
    [found] = [run for run in runs("base", "cpu") if run.startswith(kind)]
    return found


def lint(file: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([tool("hadolint"), "--no-color", file], capture_output=True, text=True, check=False)


def test_the_linter_finds_nothing() -> None:
    linted = lint(ROOT / "Dockerfile")

    assert (linted.stdout, linted.returncode) == ("", 0)


def test_the_linter_would_find_something(tmp_path: Path) -> None:
    worse = tmp_path / "Dockerfile"
    worse.write_text((ROOT / "Dockerfile").read_text().replace("--yes --no-install-recommends", ""))

    assert {"DL3014", "DL3015"} <= set(re.findall(r"DL\d+", lint(worse).stdout))


def test_there_are_a_cpu_and_a_cuda_target_of_one_base() -> None:
    assert list(TARGETS) == ["base", "cpu", "cuda"]
    assert TARGETS["base"][0] == ("FROM", "python:3.11-bookworm AS base")
    assert [TARGETS[target][0] for target in ("cpu", "cuda")] == [
        ("FROM", "base AS cpu"),
        ("FROM", "base AS cuda"),
    ]


def test_it_runs_as_a_numbered_user_whose_home_the_image_names() -> None:
    uid = re.search(r"--uid (\d+)", run_of(USER))
    users = [rest for target in TARGETS.values() for instruction, rest in target if instruction == "USER"]

    assert uid is not None
    assert users == [uid[1]]
    assert any(
        "HOME=/home/greenroom" in rest for instruction, rest in TARGETS["base"] if instruction == "ENV"
    )


def test_what_is_copied_is_there() -> None:
    for target in TARGETS.values():
        for instruction, rest in target:
            if instruction == "COPY":
                *sources, _ = [word for word in rest.split() if not word.startswith("--")]
                assert all((ROOT / source).exists() for source in sources), rest


def test_every_step_of_the_cpu_target_is_run_by_a_test_below() -> None:
    assert len(runs("base", "cpu")) == 4
    for kind in (APT, USER, MAKE, SMOKE):
        assert run_of(kind)


def test_the_step_with_make_is_what_make_test_begins_with(tmp_path: Path) -> None:
    words = shlex.split(run_of(MAKE))
    assert words[:3] == ["make", "--directory", "src"]
    assert words[3:] == ["runtime", "VENV=/home/greenroom/venv"]

    def plan(target: str) -> list[str]:
        command = ["make", "--dry-run", "--no-print-directory", target, f"VENV={tmp_path / 'venv'}"]
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True, env=_plain_environment()
        ).stdout.splitlines()

    install = plan("runtime")
    assert any("-m venv" in line for line in install)
    assert plan("test")[: len(install)] == install


def test_debian_has_the_packages(tmp_path: Path) -> None:
    """Simulated: what apt would install, but for the lists that it has already."""
    [install] = [part for part in run_of(APT).split("&&") if "apt-get install" in part]
    if shutil.which("apt-get") is None or not list(Path("/var/lib/apt/lists").glob("*Packages*")):
        pytest.skip("this machine has no Debian package lists")

    simulated = subprocess.run(
        [*shlex.split(install), "--simulate"], capture_output=True, text=True, check=False
    )

    assert simulated.returncode == 0, simulated.stderr


def test_the_user_can_be_made(tmp_path: Path) -> None:
    """Under a folder that stands for the image's root."""
    if shutil.which("useradd") is None or os.geteuid() != 0:
        pytest.skip("only root can make users")
    (tmp_path / "etc").mkdir()
    for name in ("passwd", "group", "shadow", "gshadow"):
        (tmp_path / "etc" / name).touch()

    subprocess.run([*shlex.split(run_of(USER)), "--prefix", tmp_path], check=True, capture_output=True)

    assert "greenroom:x:1000:" in (tmp_path / "etc/passwd").read_text()


def test_the_smoke_test_passes() -> None:
    subprocess.run(
        ["bash", "-c", run_of(SMOKE)],
        check=True,
        capture_output=True,
        env=_plain_environment() | {"PATH": f"{BIN}:{os.environ['PATH']}"},
    )


def test_login_shells_find_the_commands_too() -> None:
    [path] = re.findall(r"PATH=(\S+?):", " ".join(rest for _, rest in TARGETS["base"]))
    script = "PATH=/usr/bin; . deploy/docker/path.sh; echo $PATH"

    told = subprocess.run(["sh", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)

    assert told.stdout.strip() == f"{path}:/usr/bin"
    assert ("COPY", "deploy/docker/path.sh /etc/profile.d/greenroom.sh") in TARGETS["base"]


def test_the_cuda_target_installs_as_the_readme_says() -> None:
    readme = (ROOT / "README.md").read_text()
    [command] = [run for run in runs("cuda") if "pip install" in run]

    assert "pip install -c requirements/cuda.txt '.[cuda]'" in readme
    assert command.endswith("venv/bin/pip install -c src/requirements/cuda.txt './src[cuda]'")


def test_the_cuda_lock_fits_what_the_project_asks_for() -> None:
    """The step itself needs gigabytes of GPU libraries and is not run."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    locked = {}
    for line in (ROOT / "requirements/cuda.txt").read_text().splitlines():
        name, equals, version = line.partition("==")
        if equals:
            locked[canonicalize_name(name)] = version

    for text in [*project["dependencies"], *project["optional-dependencies"]["cuda"]]:
        wanted = Requirement(text)
        assert locked[canonicalize_name(wanted.name)] in wanted.specifier, text


def test_nothing_goes_into_the_image_that_git_ignores() -> None:
    ignored = {line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines() if line.strip()}
    left_out = {
        line.removeprefix("**/").strip("/")
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if not line.startswith("#")
    }

    assert ignored | {".git"} <= left_out


def _plain_environment() -> dict[str, str]:
    """Without what an outer `make` leaves for inner ones."""
    return {
        key: value for key, value in os.environ.items() if key not in {"MAKEFLAGS", "MAKELEVEL", "MFLAGS"}
    }
