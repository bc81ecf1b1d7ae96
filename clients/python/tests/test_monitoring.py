"""docker/'s Prometheus, Grafana and Compose files, beside the metrics of a real server and their documentation."""

from __future__ import annotations

import json
import operator
import re
import sys
import urllib.request
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from models import read_model
from rollout_client import SamplingParams, ServerProcess
from serving import PUSH_MODEL, REPOSITORY, SMALL_CACHE

sys.path.insert(0, str(REPOSITORY / "docker"))

from monitoring_check import Query, check_data, queries

DOCKER = REPOSITORY / "docker"
SELECTOR = r"\b([a-zA-Z_:][\w:]*)\b(?:\{([^}]*)\})?(?!\s*\()"
COMPARISONS = {">": operator.gt, "==": operator.eq}
SAMPLING = SamplingParams(max_tokens=8, seed=7, ignore_eos=True)


@pytest.fixture(scope="module")
def scraped(binary):
    """/metrics of a server that has generated, taken a push, slept and woken."""
    with ServerProcess(binary, PUSH_MODEL, [*SMALL_CACHE, "--mem-util", "0.2"]) as process:
        process.client.generate([[3, 1, 4, 1, 5]], sampling=SAMPLING, return_text=False)
        process.client.push_full(read_model(PUSH_MODEL))
        process.client.sleep()
        process.client.wake()
        url = f"http://{process.http_address}/metrics"
        urllib.request.urlopen(url, timeout=30).read()
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.read().decode()


@pytest.fixture(scope="module")
def exported(scraped):
    """Type of each metric, by its name in the text."""
    declared = dict(re.findall(r"^# TYPE (\S+) (\S+)$", scraped, re.MULTILINE))
    assert len(declared) == len(list(text_string_to_metric_families(scraped)))
    return declared


@pytest.fixture(scope="module")
def dashboard():
    return json.loads((DOCKER / "monitoring/grafana/dashboards/rollout-server.json").read_text())


def base(name, exported):
    """The metric that a series belongs to."""
    stem = re.sub(r"_(bucket|sum|count)$", "", name)
    return stem if exported.get(stem) == "histogram" else name


def selectors(expression):
    """Name and matchers of each selector of a query: what is neither a function nor a label."""
    bare = re.sub(r"\[[^]]*\]|\bby\s*\([^)]*\)", "", expression)
    return re.findall(SELECTOR, bare)


def selected(samples, name, matchers):
    """Values of the series of a selector; a variable of the dashboard stands for any value."""
    wanted = re.findall(r'(\w+)(=~|=)"([^"]*)"', matchers)
    assert ",".join(f'{label}{kind}"{value}"' for label, kind, value in wanted) == matchers, matchers
    patterns = {
        label: value if kind == "=~" else re.escape(value) for label, kind, value in wanted if not value.startswith("$")
    }
    return [
        sample.value
        for sample in samples
        if sample.name == name
        and all(re.fullmatch(value, sample.labels.get(label, "")) for label, value in patterns.items())
    ]


def has_data(expression, samples):
    """Whether there is each series that a query asks for, and one that fulfils its comparison with a number.

    Only the comparison of a metric itself can be judged by one scrape, not that of what a function makes of it.
    """
    found = [selected(samples, *selector) for selector in selectors(expression)]
    if compared := re.fullmatch(rf"{SELECTOR} (>|==) (\d+)", expression):
        holds, number = COMPARISONS[compared[3]], float(compared[4])
        found = [[value for value in values if holds(value, number)] for values in found]
    return bool(found) and all(found)


def test_each_query_of_the_dashboard_has_data_or_says_for_which_device_it_is(dashboard, scraped):
    samples = [sample for family in text_string_to_metric_families(scraped) for sample in family.samples]
    (server,) = (sample.labels for sample in samples if sample.name == "rollout:server_info")
    asked = {query: has_data(query.expression, samples) for query in queries(dashboard)}
    check_data(asked, server["device"])
    assert {query.device for query in asked} == {None, "cuda"}, "cuda alone has metrics of its own"


def test_the_check_wants_data_of_each_query_for_the_device_and_of_no_other():
    everywhere, gpu = Query("State", "rollout:lifecycle == 1"), Query("Host memory", "rollout:host > 0", "cuda")
    check_data({everywhere: True, gpu: False}, "cpu")
    check_data({everywhere: True, gpu: True}, "cuda")
    for data, device, name in (
        ({everywhere: False, gpu: False}, "cpu", "State"),
        ({everywhere: True, gpu: True}, "cpu", "Host memory"),
        ({everywhere: True, gpu: False}, "cuda", "Host memory"),
        ({}, "cpu", "no data"),
    ):
        with pytest.raises(AssertionError, match=name):
            check_data(data, device)


def test_the_dashboard_shows_what_is_exported(dashboard, exported):
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    named = {base(name, exported) for query in queries(dashboard) for name, _ in selectors(query.expression)}
    assert named - set(exported) == set(), "a query asks for what no server exports"
    ours = {name for name in exported if not name.startswith("vllm:")}
    assert ours - named == set(), "a metric is in no panel"
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
    pulled = [service["image"] for service in services.values() if "build" not in service]
    assert all(re.fullmatch(r"[\w/-]+:v?\d+\.\d+\.\d+", image) for image in pulled), pulled
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
