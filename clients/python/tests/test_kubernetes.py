"""deploy/kubernetes: valid for Kubernetes' own schemas, and a server that starts as the manifest says is healthy."""

from __future__ import annotations

import copy
import re
import ssl
import subprocess
import urllib.request

import kubernetes_validate
import pytest
import yaml

from certificates import Authority
from rollout_client import ServerProcess, Unauthenticated
from rollout_client.fleet import Fleet
from serving import PUSH_MODEL, REPOSITORY, SMALL_CACHE

DIRECTORY = REPOSITORY / "deploy" / "kubernetes"
OBJECTS = list(yaml.safe_load_all((DIRECTORY / "rollout.yaml").read_text()))
VERSIONS = ["1.35", "1.36", "1.37"]
TOKEN = "0123456789abcdef0123456789abcdef"


def of_kind(kind, objects=OBJECTS):
    (found,) = [each for each in objects if each["kind"] == kind]
    return found


def container(stateful_set):
    (found,) = stateful_set["spec"]["template"]["spec"]["containers"]
    return found


def added(document, path, value):
    """The "add" of a JSON patch (RFC 6902), which is all that the patches use."""
    *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in path.split("/")[1:]]
    for part in parents:
        document = document[int(part) if isinstance(document, list) else part]
    document[last] = value


def with_gpu():
    """The objects as `kubectl kustomize` patches them."""
    overlay = yaml.safe_load((DIRECTORY / "gpu" / "kustomization.yaml").read_text())
    objects = copy.deepcopy(OBJECTS)
    for patch in overlay["patches"]:
        (target,) = [each for each in objects if each["kind"] == patch["target"]["kind"]]
        assert target["metadata"]["name"] == patch["target"]["name"]
        for operation in yaml.safe_load(patch["patch"]):
            assert operation["op"] == "add"
            added(target, operation["path"], operation["value"])
    return objects


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("objects", [OBJECTS, with_gpu()], ids=["plain", "gpu"])
def test_every_object_is_what_kubernetes_takes(objects, version):
    assert {each["kind"] for each in objects} == {"Service", "StatefulSet", "PodDisruptionBudget", "NetworkPolicy"}
    for each in objects:
        assert kubernetes_validate.validate(each, version, strict=True).startswith(version)


@pytest.mark.parametrize("path", ["/spec/template/spec/nonsense", "/spec/template/spec/containers/0/livenessProbes"])
def test_a_field_that_kubernetes_does_not_know_is_found(path):
    broken = copy.deepcopy(of_kind("StatefulSet"))
    added(broken, path, {})
    with pytest.raises(kubernetes_validate.ValidationError, match=path.rpartition("/")[2]):
        kubernetes_validate.validate(broken, VERSIONS[-1], strict=True)


def test_names_and_labels_lead_from_one_object_to_the_next():
    service, pods = of_kind("Service"), of_kind("StatefulSet")
    template = pods["spec"]["template"]
    labels = template["metadata"]["labels"]
    assert service["spec"]["clusterIP"] == "None" and pods["spec"]["serviceName"] == service["metadata"]["name"]
    for selector in (
        service["spec"]["selector"],
        pods["spec"]["selector"]["matchLabels"],
        of_kind("PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        of_kind("NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
    server = container(pods)
    ports = {port["name"]: port["containerPort"] for port in server["ports"]}
    assert {port["name"]: port["port"] for port in service["spec"]["ports"]} == ports
    named = [port["targetPort"] for port in service["spec"]["ports"]]
    named += [server[probe]["httpGet"]["port"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")]
    named += [port["port"] for rule in of_kind("NetworkPolicy")["spec"]["ingress"] for port in rule["ports"]]
    assert set(named) == ports.keys()
    volumes = {volume["name"] for volume in template["spec"]["volumes"]}
    assert {mount["name"] for mount in server["volumeMounts"]} == volumes


def test_secrets_and_limits_are_where_the_server_looks_for_them():
    pods = of_kind("StatefulSet")["spec"]["template"]["spec"]
    server = container(of_kind("StatefulSet"))
    mounts = {mount["mountPath"]: mount["name"] for mount in server["volumeMounts"]}
    files = {entry["name"]: entry["value"] for entry in server["env"] if entry["value"].startswith("/")}
    assert len(files) == 3
    for file in files.values():
        directory, _, name = file.rpartition("/")
        (volume,) = [volume for volume in pods["volumes"] if volume["name"] == mounts[directory]]
        assert volume["secret"]["defaultMode"] & 0o007 == 0 and name in {"tokens", "tls.crt", "tls.key"}
    (made,) = re.findall(r"--from-literal=(\w+)=", (DIRECTORY / "rollout.yaml").read_text())
    assert files["ROLLOUT_AUTH_TOKEN_FILE"].endswith(f"/{made}")
    flags = (REPOSITORY / "docs" / "flags.md").read_text()
    for entry in server["env"]:
        flag = entry["name"].removeprefix("ROLLOUT_").lower().replace("_", "-")
        assert f"`--{flag}`" in flags, entry
    (grace,) = re.findall(r"`--shutdown-grace-seconds` \| (\d+)", flags)
    assert pods["terminationGracePeriodSeconds"] > int(grace)
    gpu = container(of_kind("StatefulSet", with_gpu()))["resources"]["limits"]
    assert gpu["nvidia.com/gpu"] == 1 and gpu["memory"] == server["resources"]["limits"]["memory"]


def test_a_server_as_the_manifest_starts_it_is_healthy_and_a_fleet_reaches_it(binary, tmp_path, monkeypatch):
    server = container(of_kind("StatefulSet"))
    authority = Authority(tmp_path)
    cert, key, _ = authority.issue("server")
    tokens = tmp_path / "tokens"
    tokens.write_text(f"control {TOKEN}")
    tokens.chmod(0o440)
    places = {"/secrets/tokens/tokens": tokens, "/secrets/tls/tls.crt": cert, "/secrets/tls/tls.key": key}
    for entry in server["env"]:
        monkeypatch.setenv(entry["name"], str(places.get(entry["value"], entry["value"])))
    monkeypatch.setenv("ROLLOUT_MEM_UTIL", "0.2")
    reach = {"token": TOKEN, "tls": {"ca": str(authority.path)}}
    with ServerProcess(binary, PUSH_MODEL, SMALL_CACHE, output=subprocess.DEVNULL, **reach) as process:
        trusted = ssl.create_default_context(cafile=str(authority.path))
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            get = server[probe]["httpGet"]
            url = f"{get['scheme'].lower()}://{process.http_address}{get['path']}"
            with urllib.request.urlopen(url, timeout=30, context=trusted) as answer:
                assert answer.status == 200
        with Fleet([process.address], **reach) as fleet:
            assert fleet.push_lora(None).missed == []
            fleet.sleep()
            with urllib.request.urlopen(url, timeout=30, context=trusted) as answer:
                assert answer.status == 200, "a server that sleeps is healthy"
            fleet.wake()
        with pytest.raises(Unauthenticated, match="no token"), Fleet([process.address], tls=reach["tls"]):
            pass
