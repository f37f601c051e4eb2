"""The manifests for KubeRay: pods against Kubernetes' own schema, all around them against `kuberay_schema.yaml`.

That file is a reduced schema, written from KubeRay's field reference; it is not the definition that KubeRay generates.
It refuses what it does not name, so what a manifest newly uses has to be looked up in that reference first.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from ray import __version__ as installed_ray

from tests.deploy.command_lines import ROOT, commands, understand

FOLDER = ROOT / "deploy/kuberay"
SCHEMA = yaml.safe_load((ROOT / "tests/deploy/kuberay_schema.yaml").read_text())
RAY = ["raycluster.yaml", "rayjob.yaml"]
OLDEST, NEWEST = "1.28", "1.37"
"""Of Kubernetes."""


def manifest(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text())
    return loaded


def cluster_of(document: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = document["spec"]
    return spec["rayClusterSpec"] if document["kind"] == "RayJob" else spec


def pods(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    cluster = cluster_of(document)
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        yield group["template"]


def check(document: dict[str, Any]) -> None:
    jsonschema.validate(document, SCHEMA)
    for template in pods(document):
        for version in (OLDEST, NEWEST):
            kubernetes_validate.validate(
                {"apiVersion": "v1", "kind": "Pod", **template}, version, strict=True
            )


@pytest.mark.parametrize("name", RAY)
def test_kuberay_and_kubernetes_know_every_field(name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    check(manifest(name))


def test_kubernetes_knows_every_field_of_the_shared_volume() -> None:
    kubernetes_validate.validate(manifest("storage.yaml"), NEWEST, strict=True)


@pytest.mark.parametrize("name", RAY)
def test_a_field_unknown_to_kuberay_is_refused(name: str) -> None:
    document = manifest(name)
    cluster_of(document)["workerGroupSpecs"][0]["maxReplica"] = 3

    with pytest.raises(jsonschema.ValidationError, match="maxReplica"):
        check(document)


@pytest.mark.parametrize("name", RAY)
def test_a_field_unknown_to_kubernetes_is_refused(name: str) -> None:
    document = manifest(name)
    next(pods(document))["spec"]["containers"][0]["volumeMount"] = []

    with pytest.raises(kubernetes_validate.ValidationError, match="volumeMount"):
        check(document)


def test_numbers_for_rays_start_have_to_be_text() -> None:
    document = copy.deepcopy(manifest("raycluster.yaml"))
    document["spec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] = 0

    with pytest.raises(jsonschema.ValidationError, match="string"):
        check(document)


@pytest.mark.parametrize("name", RAY)
def test_ray_understands_the_parameters_of_its_start(name: str) -> None:
    cluster = cluster_of(manifest(name))
    for group, first in ((cluster["headGroupSpec"], "--head"), (cluster["workerGroupSpecs"][0], "--block")):
        given = [f"--{key}={value}" for key, value in group["rayStartParams"].items()]
        understand(["ray", "start", first, *given])


@pytest.mark.parametrize("name", RAY)
def test_the_cluster_is_of_the_ray_that_greenroom_is_locked_to_and_wants_a_token(name: str) -> None:
    cluster = cluster_of(manifest(name))

    assert cluster["rayVersion"] == installed_ray
    assert cluster["authOptions"] == {"mode": "token"}


@pytest.mark.parametrize("name", RAY)
def test_every_pod_sees_the_shared_volume_and_runs_as_the_images_user(name: str) -> None:
    claim = manifest("storage.yaml")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for pod in pods(manifest(name)):
        spec = pod["spec"]
        assert spec["volumes"] == [
            {"name": "shared", "persistentVolumeClaim": {"claimName": claim["metadata"]["name"]}}
        ]
        assert spec["containers"][0]["volumeMounts"] == [{"name": "shared", "mountPath": "/mnt/greenroom"}]
        assert spec["securityContext"]["runAsUser"] == 1000


@pytest.mark.parametrize("name", RAY)
def test_workers_get_what_they_ask_for_and_the_head_no_gpu(name: str) -> None:
    head, worker = pods(manifest(name))

    for pod in (head, worker):
        resources = pod["spec"]["containers"][0]["resources"]
        assert resources["requests"] == resources["limits"]
    assert "nvidia.com/gpu" not in head["spec"]["containers"][0]["resources"]["limits"]
    assert worker["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"


def test_the_job_is_a_command_that_greenroom_understands() -> None:
    spec = manifest("rayjob.yaml")["spec"]
    before, _, command = spec["entrypoint"].partition(" greenroom ")

    assert before == "env --chdir=/mnt/greenroom/project"
    [words] = commands(f"greenroom {command}", "greenroom")
    understand(words)
    assert any(word.startswith("output_dir=/mnt/greenroom/") for word in words)
    assert yaml.safe_load(spec["runtimeEnvYAML"]) == {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "600"}}
