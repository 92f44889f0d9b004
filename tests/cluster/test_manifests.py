"""The manifests in cluster/kubernetes: their fields are those of the schemas, and their pods train together.

KUBERNETES_CRDS names a folder with the schemas of the operators, as GROUP_VERSION_KIND.json or .json.xz.
"""

from __future__ import annotations

import json
import lzma
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from entrypoint.cli.parser import parse_command_line
from entrypoint.core.errors import NOT_RETRYABLE, ExitCode
from entrypoint.job.detect import detect_job
from entrypoint.job.detect_nodes import detect_node_group
from entrypoint.settings import LaunchSettings, read_launch_settings
from tests.cluster.conftest import ENTRYPOINT, Cluster
from tests.containers.conftest import REPOSITORY

yaml = pytest.importorskip("yaml")
FOLDER = REPOSITORY / "cluster/kubernetes"
FILES = sorted(path.name for path in FOLDER.glob("*.yaml"))
# The variables that each platform adds to the second of two pods, and the name of the first.
PODS: dict[str, tuple[dict[str, str], str]] = {
    "indexed-job.yaml": ({"JOB_COMPLETION_INDEX": "1"}, "pets-0.pets"),
    "jobset.yaml": ({"JOB_COMPLETION_INDEX": "1"}, "pets-node-0-0.pets"),
    # kubeflow/trainer, pkg/runtime/framework/plugins/torch/torch.go
    "trainjob.yaml": (
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


def documents(file: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / file).read_text()))


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


@pytest.mark.parametrize("file", FILES)
def test_fields_of_operators_kinds_are_in_their_schema(file: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    own = [one for one in documents(file) if "." in one["apiVersion"].partition("/")[0]]
    for one in own:
        schema = schema_of(one)
        jsonschema.Draft7Validator(schema).validate(one)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.Draft7Validator(schema).validate({**one, "spec": {**one["spec"], "nodes": 2}})


@pytest.mark.parametrize("file", FILES)
def test_fields_of_kubernetes_kinds_are_in_their_schema(file: str) -> None:
    """An operator's schema often leaves a pod's fields open, hence each pod is checked as one of Kubernetes."""
    check = pytest.importorskip("kubernetes_validate", reason="needs the package kubernetes-validate")
    found = documents(file)
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


@pytest.mark.parametrize("file", FILES)
def test_pods_are_what_the_profile_restricted_takes(file: str) -> None:
    """The Pod Security Standards: kubernetes.io/docs/concepts/security/pod-security-standards, and no token."""
    pods = [spec for spec in find_all(documents(file), "spec") if isinstance(spec, dict) and "containers" in spec]
    assert pods
    for spec in pods:
        around = spec["securityContext"]
        assert (around["runAsNonRoot"], around["seccompProfile"]["type"]) == (True, "RuntimeDefault")
        assert around["runAsUser"] > 0
        # A TrainJob's schema has no such field: there the service account says it.
        assert spec.get("automountServiceAccountToken") is (None if file == "trainjob.yaml" else False)
        assert spec["terminationGracePeriodSeconds"] > LaunchSettings().grace_period_s
        assert (
            around.get("fsGroupChangePolicy", "OnRootMismatch" if "fsGroup" not in around else "") == "OnRootMismatch"
        )
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        assert all(set(volume) <= {"name", "persistentVolumeClaim", "emptyDir"} for volume in spec.get("volumes", ()))
        for container in spec["containers"]:
            inside = container["securityContext"]
            assert (inside["allowPrivilegeEscalation"], inside["capabilities"]["drop"]) == (False, ["ALL"])


@pytest.mark.parametrize("file", ["indexed-job.yaml", "jobset.yaml"])
def test_exit_codes_end_or_repeat_the_job(file: str) -> None:
    (policy,) = find_all(documents(file), "podFailurePolicy")
    by_code = {
        code: rule["action"] for rule in policy["rules"] for code in rule.get("onExitCodes", {}).get("values", ())
    }
    kept = {
        code: "Ignore" if code == ExitCode.PREEMPTED else "FailJob" for code in (*NOT_RETRYABLE, ExitCode.PREEMPTED)
    }
    assert by_code == {code: action for code, action in kept.items() if code in by_code}
    assert {int(ExitCode.USAGE), int(ExitCode.MACHINE), int(ExitCode.PREEMPTED)} == set(by_code)
    assert [set(find_all(policy, "type")), *set(find_all(documents(file), "restartPolicy"))] == [
        {"DisruptionTarget"},
        "Never",
    ]


def environment(file: str) -> dict[str, str]:
    """Return the variables that a manifest sets."""
    entries = [one for listed in find_all(documents(file), "env") for one in listed]
    return {one["name"]: one.get("value", "the key that a Secret has") for one in entries}


@pytest.mark.parametrize("file", PODS)
def test_pods_of_manifest_are_nodes_of_one_job(file: str) -> None:
    given, master = PODS[file]
    environ = environment(file) | given
    found = detect_node_group(read_launch_settings(environ, {}), environ, detect_job(environ))
    assert (found.nnodes, found.node_rank, found.master_addr) == (2, 1, master)


@pytest.mark.parametrize("file", FILES)
def test_command_of_manifest_is_one_of_the_entrypoint(file: str) -> None:
    words = next(args for args in find_all(documents(file), "args") if "train" in args)
    flags = words[words.index("train") :]
    parsed = parse_command_line(flags, in_image=True)
    assert (parsed.command, set(parsed.train_flags)) == ("train", {"model", "epochs"})


@pytest.mark.cluster
@pytest.mark.parametrize("file", PODS)
def test_pods_of_manifest_train_together(cluster: Cluster, file: str, tmp_path: Path) -> None:
    given, first = PODS[file]
    address = cluster.run("node1", "hostname", "-I").out.split()[0]
    hosts = tmp_path / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n{address} node1 {first}\n")
    cluster.do("hosts", "node1", hosts)
    second = cluster.run("node2", "hostname", "-I").out.split()[0]
    (tmp_path / "hosts2").write_text(f"127.0.0.1 localhost\n{address} {first}\n{second} node2\n")
    cluster.do("hosts", "node2", tmp_path / "hosts2")
    kept = {name: value for name, value in environment(file).items() if name not in ("TRAIN_DATASET", "TRAIN_DATA_DIR")}
    environ = kept | {"TRAIN_OUTPUT_DIR": str(cluster.folder / "runs"), "TRAIN_EPOCHS": "1"}
    started = []
    for index in ("0", "1"):
        pod = {
            name: index if name in ("JOB_COMPLETION_INDEX", "PET_NODE_RANK") else value for name, value in given.items()
        }
        started.append(cluster.start(f"node{int(index) + 1}", *ENTRYPOINT, "train", env=environ | pod))
    assert [one.code() for one in started] == [0, 0], started[0].text()[-2000:]
    assert cluster.summary("pets")["world_size"] == 2
