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
from typing import Any

MONITORING = Path(__file__).resolve().parent / "monitoring"
ADDRESS = "127.0.0.1:9090"
WAIT_SECONDS = 60.0
SCRAPES = 6
"""So many of them have what the panels show: `rate` needs two within its range."""
GRAFANA = {"__rate_interval": "20s"}
"""What Grafana puts in place of its own variable: four scrapes. Those of the dashboard stand for any value."""


def panels(node: Any) -> Iterator[tuple[str, str]]:
    """Title and query of all panels of a dashboard, those in rows included."""
    for panel in node.get("panels", []):
        yield from panels(panel)
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]


def queries(dashboard: Any) -> Iterator[tuple[str, str]]:
    """Those of the panels, of the marks in all of them, and of the variables, which list the values of a label."""
    yield from panels(dashboard)
    for annotation in dashboard["annotations"]["list"]:
        yield annotation["name"], annotation["expr"]
    for variable in dashboard["templating"]["list"]:
        yield variable["name"], re.sub(r"label_values\((.+), (\w+)\)", r"count by (\2) (\1)", variable["definition"])


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
    """Scrapes while `work` is repeated; what there was to see, in a line. Fails for a target that is down or a panel
    without data."""
    with tempfile.TemporaryDirectory() as directory, prometheus(program, Path(directory)):
        until(answers, "Prometheus did not answer")
        while scrapes() < SCRAPES:
            work()
            time.sleep(0.5)
        targets = ask("targets")["activeTargets"]
        down = [(target["scrapeUrl"], target["lastError"]) for target in targets if target["health"] != "up"]
        assert targets and not down, down
        dashboards = [json.loads(path.read_text()) for path in sorted(MONITORING.glob("grafana/dashboards/*.json"))]
        values = {query: evaluate(query[1]) for dashboard in dashboards for query in queries(dashboard)}
        empty = [query for query, series in values.items() if not series]
        assert values and not empty, f"no data: {empty}"
        unknown = [title for (title, _), series in values.items() if all(math.isnan(value) for value in series)]
        series = sum(len(series) for series in values.values())
        return f"{len(targets)} target up, {len(values)} queries gave {series} series; without a value yet: {unknown}"
