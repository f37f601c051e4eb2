"""What can be found wrong before anything is sent is told at once, with the thing, its value and the remedy."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.cli import app
from services.config import ConfigError
from services.jobs.package import Package, check, look_into
from tests.services.jobs.head_node import Head, free_port


def submit(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["submit", *map(str, arguments)])
    return result.exit_code, result.output


@pytest.fixture
def here(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project as the current folder, and an address at which nobody listens: whoever asks it has gone too far."""
    monkeypatch.chdir(project)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", f"http://127.0.0.1:{free_port()}")
    return project


@pytest.mark.parametrize("name", ["--address", "RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"])
@pytest.mark.parametrize("form", ["http://127.0.0.1:{}", "127.0.0.1:{}", "ray://127.0.0.1:{}"])
def test_an_address_at_which_nobody_listens_is_told_quickly(
    here: Path, monkeypatch: pytest.MonkeyPatch, name: str, form: str
) -> None:
    address = form.format(free_port())
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS")
    if name != "--address":
        monkeypatch.setenv(name, address)
    began = time.monotonic()
    status, told = submit("run.yaml", *(["--address", address] if name == "--address" else []))
    assert status == 2
    assert f"{address} ({name})" in told
    assert "ray start --head --dashboard-host" in told
    assert time.monotonic() - began < 30


def test_the_addresss_option_wins_over_the_environment(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    status, told = submit("run.yaml", "--address", "http://127.0.0.1:2")
    assert status == 2
    assert "127.0.0.1:2 (--address)" in told


def test_a_server_that_never_answers_is_given_up(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from services.jobs import client

    monkeypatch.setattr(client, "_REQUEST_S", (1.0, 1.0))
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        status, told = submit("run.yaml", "--address", url)
    assert status == 2
    assert url in told
    assert "ead timed out" in told


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run.yaml", "args.num_episode=3"], ["args.num_episode", "args.num_episodes"]),
        (["absent.yaml"], ["absent.yaml", "there is no such file"]),
        (["run.yaml", "environment.name=my_cod.py:make"], ["environment.name", "'my_cod.py:make'", "no file"]),
        (["run.yaml", "--exclude", "*.py"], ["my_code.py does not go to the cluster", "--exclude '!my_code.py'"]),
        (["run.yaml", "sequence_reward=../other.py:sum"], ["sequence_reward", "no file ../other.py"]),
        (["run.yaml", "--resume", "runs/a"], ["--resume", "runs/a", "absolute"]),
        (["run.yaml", "--no-wait", "--follow"], ["--no-wait"]),
        (["run.yaml", "--working-dir", "runs"], ["run.yaml lies outside the working directory"]),
        (["run.yaml", "--working-dir", "nowhere"], ["nowhere is no folder"]),
        (["run.yaml", "--env", "A"], ["--env", "'A'", "NAME=VALUE"]),
    ],
)  # fmt: skip
def test_bad_input_is_refused_before_anything_is_sent(
    here: Path, arguments: list[str], said: list[str]
) -> None:
    status, told = submit(*arguments)
    assert status == 2
    for text in said:
        assert text in " ".join(told.split())
    assert "job server" not in told


def test_a_relative_output_dir_is_warned_of(here: Path) -> None:
    _, told = submit("run.yaml", "output_dir=here")
    assert "output_dir: here is relative" in told
    _, told = submit("run.yaml")
    assert "is relative" not in told


def test_a_configuration_is_found_in_the_working_directory_too(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, told = submit("run.yaml", "--working-dir", "project", "--address", "http://127.0.0.1:1")
    assert status == 2
    assert "job server" in told


def test_a_package_is_what_ray_packs(project: Path, tmp_path: Path) -> None:
    from zipfile import ZipFile

    from ray._private.runtime_env.packaging import create_package, get_uri_for_directory  # noqa: F401

    (project / "deep" / "__pycache__").mkdir(parents=True)
    (project / "deep" / "__pycache__" / "x.pyc").touch()
    (project / "deep" / "kept.txt").touch()
    package = look_into(project, ["notes.md"])
    archive = tmp_path / "package.zip"
    create_package(str(project), archive, include_gitignore=True, excludes=package.excludes)
    with ZipFile(archive) as packed:
        names = {name for name in packed.namelist() if not name.endswith("/")}
    assert set(package.files) == names == {"run.yaml", "my_code.py", ".gitignore", "deep/kept.txt"}


def test_what_was_left_out_can_be_taken_along(project: Path) -> None:
    assert "runs" not in look_into(project, [])
    assert "runs" in look_into(project, ["!runs/"])


def test_a_data_file_that_stays_behind_is_told(project: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"train_dataset.path: secret.txt does not go to the cluster: a .gitignore"
    ):
        check(
            look_into(project, []),
            "run.yaml",
            {"train_dataset": {"path": "./secret.txt"}, "output_dir": "runs"},
        )


def test_a_package_too_large_for_ray_names_its_largest_files(project: Path) -> None:
    with (project / "weights.bin").open("wb") as file:
        file.truncate(600 * 2**20)
    with pytest.raises(ConfigError, match=r"more than the \d+ MiB .* weights.bin \(600 MiB\)"):
        look_into(project, [])
    assert look_into(project, ["*.bin"]).size < 10_000


def test_code_that_would_hide_greenrooms_own_is_refused_unless_it_is_a_checkout_of_it(tmp_path: Path) -> None:
    def package(*files: str) -> Package:
        return Package(tmp_path, [], dict.fromkeys(["run.yaml", *files], 1))

    for hiding in ("services.py", "learners/mine.py"):
        with pytest.raises(ConfigError, match="in place of Greenroom's own package"):
            check(package(hiding), "run.yaml", {})
    check(package("services/cli.py", "actors/engine.py"), "run.yaml", {})
    check(package("my_services/cli.py"), "run.yaml", {})


@pytest.mark.ray
def test_without_the_clusters_token_nobody_gets_in(head: Head, project: Path, tmp_path: Path) -> None:
    told = head.greenroom("jobs", cwd=project, RAY_AUTH_TOKEN="", HOME=str(tmp_path))
    assert told.returncode == 2
    assert head.url in told.stderr
    assert "RAY_AUTH_TOKEN" in told.stderr
    wrong = head.greenroom("jobs", cwd=project, RAY_AUTH_TOKEN="f" * 32)
    assert wrong.returncode == 2


@pytest.mark.ray
@pytest.mark.parametrize("command", [["logs"], ["logs", "--follow"], ["stop"]])
def test_a_job_that_is_not_there_is_told(head: Head, project: Path, command: list[str]) -> None:
    told = head.greenroom(*command, "raysubmit_none", cwd=project)
    assert told.returncode == 2
    assert f"there is no job raysubmit_none at {head.url}" in told.stderr
