"""`cluster.yaml` as `ray up` reads it: filled with Ray's defaults for AWS, then held against Ray's own schema."""

from __future__ import annotations

import copy
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from tests.deploy.command_lines import ROOT, commands, understand

FILE = ROOT / "cluster.yaml"


@pytest.fixture
def written() -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(FILE.read_text())
    return config


def accepted(config: dict[str, Any]) -> dict[str, Any]:
    """What `ray up` makes of `config` before it asks the cloud anything."""
    prepared: dict[str, Any] = prepare_config(copy.deepcopy(config))
    validate_config(prepared)
    return prepared


def test_ray_accepts_it(written: dict[str, Any]) -> None:
    prepared = accepted(written)

    assert prepared["provider"]["type"] == "aws"
    assert prepared["available_node_types"]["gpu_worker"]["max_workers"] == prepared["max_workers"] == 8
    assert prepared["available_node_types"]["head"]["max_workers"] == 0


def test_ray_would_refuse_a_field_it_does_not_know(written: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError, match="max_worker"):
        accepted({**written, "max_worker": 8})


def test_ray_would_refuse_a_wrong_field_of_a_node_type(written: dict[str, Any]) -> None:
    written["available_node_types"]["gpu_worker"]["instance_type"] = "g6e.4xlarge"

    with pytest.raises(jsonschema.ValidationError, match="instance_type"):
        accepted(written)


def test_ray_would_refuse_more_nodes_at_the_start_than_at_most(written: dict[str, Any]) -> None:
    written["available_node_types"]["gpu_worker"]["min_workers"] = 9

    with pytest.raises(ValueError, match="max_workers"):
        accepted(written)


def test_everything_is_from_the_image_and_nothing_from_rays_defaults(written: dict[str, Any]) -> None:
    prepared = accepted(written)

    assert prepared["worker_setup_commands"] == []
    assert prepared["head_setup_commands"] == ["pip install --quiet 'boto3>=1.35'"]


@pytest.mark.parametrize("kind", ["head_start_ray_commands", "worker_start_ray_commands"])
def test_ray_understands_the_commands_that_start_it(written: dict[str, Any], kind: str) -> None:
    found = [words for line in written[kind] for words in commands(line, "ray")]

    assert [words[1] for words in found] == ["stop", "start"]
    for words in found:
        understand(words)


def test_every_command_for_a_machine_is_a_sentence_of_shell(written: dict[str, Any]) -> None:
    for line in [*written["initialization_commands"], *written["head_setup_commands"]]:
        checked = subprocess.run(["bash", "-n", "-c", line], capture_output=True, text=True, check=False)
        assert checked.returncode == 0, (line, checked.stderr)


def test_the_cluster_lets_nobody_in_without_its_token(written: dict[str, Any]) -> None:
    assert "--env RAY_AUTH_MODE=token" in written["docker"]["run_options"]
    assert written["file_mounts"] == {"/home/greenroom/.ray/auth_token": "~/.ray/auth_token"}


def test_all_nodes_see_the_shared_folder_in_the_container(written: dict[str, Any]) -> None:
    assert "--volume /mnt/greenroom:/mnt/greenroom" in written["docker"]["run_options"]
    assert any("mount -t nfs4" in line for line in written["initialization_commands"])


def test_what_is_the_users_own_is_marked() -> None:
    text = Path(FILE).read_text()
    marked = [line for line in text.splitlines() if "REPLACE" in line]

    for own in ("registry.example.com", "ami-0123456789abcdef0", "fs-0123456789abcdef0"):
        assert any(own in line for line in marked), own
