"""Lets a real Prometheus scrape a server by docker/monitoring, and asks it what the panels of the dashboard ask.

For docker/image_check.py. Prometheus runs in a mount namespace where `rollout`, the server's name in Compose, is this
machine.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

MONITORING = Path(__file__).resolve().parent / "monitoring"
ADDRESS = "127.0.0.1:9090"
WAIT_SECONDS = 60.0
SCRAPES = 6
"""So many of them have what the panels show: `rate` needs two within its range."""
GRAFANA = {"__rate_interval": "20s"}
"""What Grafana puts in place of its own variable: four scrapes. Those of the dashboard stand for any value."""
ONLY_WITH = re.compile(r"Only with --device (\w+): ")
"""How the description of a panel begins that has data on one device alone."""


class Query(NamedTuple):
    """A query of the dashboard."""

    title: str
    """Of the panel, annotation or variable."""
    expression: str
    """PromQL with Grafana's variables."""
    device: str | None = None
    """The only device on which it has data; None: it has on all."""


def panels(node: Any) -> Iterator[Query]:
    """The queries of all panels of a dashboard, those in rows included."""
    for panel in node.get("panels", []):
        yield from panels(panel)
        only = ONLY_WITH.match(panel.get("description", ""))
        for target in panel.get("targets", []):
            yield Query(panel["title"], target["expr"], only and only[1])


def queries(dashboard: Any) -> Iterator[Query]:
    """The queries of panels, annotations and variables; a variable lists the values of a label."""
    yield from panels(dashboard)
    for annotation in dashboard["annotations"]["list"]:
        yield Query(annotation["name"], annotation["expr"])
    for variable in dashboard["templating"]["list"]:
        listed = re.sub(r"label_values\((.+), (\w+)\)", r"count by (\2) (\1)", variable["definition"])
        yield Query(variable["name"], listed)


def check_data(has_data: dict[Query, bool], device: str) -> None:
    """Fails if on `device` a query has no data, or has data although its panel says that it is for another device."""
    foreign = [query for query in has_data if query.device not in (None, device)]
    empty = [query for query, data in has_data.items() if not data and query not in foreign]
    assert has_data and not empty, f"no data on {device}: {empty}"
    wrong = [query for query in foreign if has_data[query]]
    assert not wrong, f"data on {device}, but the panel says that it is for another device: {wrong}"


def ask(path: str, **parameters: str) -> Any:
    """What Prometheus answers."""
    query = f"http://{ADDRESS}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    try:
        with urllib.request.urlopen(query, timeout=30) as answer:
            return json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{path} {parameters}: {error.read().decode()}") from None


def evaluate(expression: str) -> list[float]:
    """The values of a panel's query now."""
    filled = re.sub(r"\$\{?(\w+)\}?", lambda name: GRAFANA.get(name[1], ".*"), expression)
    return [float(series["value"][1]) for series in ask("query", query=filled)["result"]]


@contextlib.contextmanager
def prometheus(program: str, directory: Path) -> Iterator[None]:
    """A Prometheus with the configuration that Compose gives it."""
    hosts = directory / "hosts"
    hosts.write_text("127.0.0.1 localhost rollout\n")
    flags = [f"--config.file={MONITORING / 'prometheus.yml'}", f"--storage.tsdb.path={directory / 'data'}"]
    script = 'mount --bind "$1" /etc/hosts && shift && exec "$@"'
    command = [program, *flags, f"--web.listen-address={ADDRESS}"]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            ["unshare", "--mount", "sh", "-ec", script, "sh", str(hosts), *command], stdout=log, stderr=log
        )
        try:
            yield
        except BaseException:
            log.seek(0)
            print(log.read().decode(errors="replace"))
            raise
        finally:
            process.terminate()
            process.wait(WAIT_SECONDS)


def until(ready: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not ready():
        assert time.monotonic() < end, f"{what} within {WAIT_SECONDS:.0f} s"
        time.sleep(0.2)


def answers() -> bool:
    with contextlib.suppress(OSError):
        return bool(ask("status/runtimeinfo"))
    return False


def scrapes() -> int:
    """How often the target that was scraped least was scraped."""
    counts = ask("query", query="count_over_time(up[1h])")["result"]
    return min((int(series["value"][1]) for series in counts), default=0)


def check(program: str, work: Callable[[], None]) -> str:
    """Scrapes while `work` is repeated; what there was to see, in a line. Fails for a target that is down, or as
    `check_data` does."""
    with tempfile.TemporaryDirectory() as directory, prometheus(program, Path(directory)):
        until(answers, "Prometheus did not answer")
        while scrapes() < SCRAPES:
            work()
            time.sleep(0.5)
        targets = ask("targets")["activeTargets"]
        down = [(target["scrapeUrl"], target["lastError"]) for target in targets if target["health"] != "up"]
        assert targets and not down, down
        dashboards = [json.loads(path.read_text()) for path in sorted(MONITORING.glob("grafana/dashboards/*.json"))]
        values = {query: evaluate(query.expression) for dashboard in dashboards for query in queries(dashboard)}
        (server,) = ask("query", query="rollout:server_info")["result"]
        device = server["metric"]["device"]
        check_data({query: bool(series) for query, series in values.items()}, device)
        given = {query: series for query, series in values.items() if series}
        unknown = [query.title for query, series in given.items() if all(math.isnan(value) for value in series)]
        series = sum(len(series) for series in given.values())
        others = len(values) - len(given)
        return (
            f"{len(targets)} target up, {len(given)} queries gave {series} series, {others} are not for {device}; "
            f"without a value yet: {unknown}"
        )
