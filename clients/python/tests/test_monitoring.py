"""docker/'s Prometheus, Grafana and Compose files, beside the metrics of a real server and their documentation."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from rollout_client import ServerProcess
from serving import PUSH_MODEL, REPOSITORY, SMALL_CACHE

DOCKER = REPOSITORY / "docker"
METRIC = re.compile(r"\b((?:rollout:|grpc_server_|http_requests_|process_)[a-z0-9_]+)")


@pytest.fixture(scope="module")
def exported(binary):
    """Type of each metric of a server that has answered a call through each door, by its name in the text."""
    with ServerProcess(binary, PUSH_MODEL, [*SMALL_CACHE, "--mem-util", "0.2"]) as process:
        process.client.info()
        url = f"http://{process.http_address}/metrics"
        urllib.request.urlopen(url, timeout=30).read()
        with urllib.request.urlopen(url, timeout=30) as answer:
            text = answer.read().decode()
    families = {family.name: family.type for family in text_string_to_metric_families(text)}
    declared = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    assert len(declared) == len(families)
    return declared


def base(name, exported):
    """The metric that a series belongs to."""
    stem = re.sub(r"_(bucket|sum|count)$", "", name)
    return stem if exported.get(stem) == "histogram" else name


def test_the_dashboard_shows_what_is_exported(exported):
    dashboard = json.loads((DOCKER / "monitoring/grafana/dashboards/rollout-server.json").read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    named = {base(name, exported) for p in panels for t in p["targets"] for name in METRIC.findall(t["expr"])}
    assert named - set(exported) == set(), "a panel asks for what no server exports"
    assert set(exported) - named == set(), "a metric is in no panel"
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24 and panel["title"] and panel["targets"], panel
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {"prometheus"}


def test_the_documentation_lists_what_is_exported(exported):
    text = (REPOSITORY / "docs/observability.md").read_text()
    rows = dict(re.findall(r"^\| `([a-z0-9_:]+)` \| (counter|gauge|histogram) \|", text, re.MULTILINE))
    assert rows == exported


def test_compose_starts_prometheus_and_grafana_with_the_profile():
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    services = compose["services"]
    assert set(services) == {"rollout", "prometheus", "grafana"}
    assert "profiles" not in services["rollout"]
    for name in ("prometheus", "grafana"):
        service = services[name]
        assert service["profiles"] == ["monitoring"]
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            known = (DOCKER / source).exists() if source.startswith(".") else source in compose["volumes"]
            assert known, volume
    scrape = yaml.safe_load((DOCKER / "monitoring/prometheus.yml").read_text())["scrape_configs"]
    (target,) = scrape[0]["static_configs"][0]["targets"]
    service, port = target.split(":")
    assert service in services and any(p.endswith(f":{port}") for p in services[service]["ports"])


def test_grafana_finds_what_is_provisioned():
    grafana = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]["grafana"]
    mounted = {target: DOCKER / source for source, target, _ in (volume.split(":") for volume in grafana["volumes"])}
    # A mount of all would hide the other directories of the image, and Grafana logs an error for each that it misses.
    sources, providers = "/etc/grafana/provisioning/datasources", "/etc/grafana/provisioning/dashboards"
    assert {target for target in mounted if target.startswith("/etc/")} == {sources, providers}
    (source,) = yaml.safe_load((mounted[sources] / "prometheus.yml").read_text())["datasources"]
    assert (source["uid"], source["url"]) == ("prometheus", "http://prometheus:9090")
    (provider,) = yaml.safe_load((mounted[providers] / "rollout.yml").read_text())["providers"]
    dashboards = provider["options"]["path"]
    home = Path(grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert str(home.parent) == dashboards and (mounted[dashboards] / home.name).is_file()
