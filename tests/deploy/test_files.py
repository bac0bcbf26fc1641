"""What can be said of the deployment files without running them: they lint, and they agree with each other."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DASHBOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))


def documented_metrics() -> set[str]:
    """Sample names, so a histogram's are its `_bucket`, `_sum` and `_count`."""
    names = set()
    for line in (ROOT / "docs" / "metrics.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[0].startswith("`"):
            for name in re.findall(r"`(\w+)`", cells[0]):
                histogram = cells[1] == "histogram"
                names |= {name + part for part in ("_bucket", "_sum", "_count")} if histogram else {name}
    return names


def metrics_in(text: str) -> set[str]:
    return set(re.findall(r"\b(?:pellucid|process)_\w+", text))


def panels(dashboard: Path) -> list[dict[str, Any]]:
    return [panel for panel in json.loads(dashboard.read_text())["panels"] if panel["type"] != "row"]


def test_the_dockerfile_is_free_of_lint() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run([hadolint, str(ROOT / "Dockerfile")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_and_dashboards_use_metrics_that_are_documented() -> None:
    documented = documented_metrics()
    assert "pellucid_time_to_first_token_seconds_bucket" in documented
    rules = (DEPLOY / "alerts.yml").read_text()
    alerts = metrics_in("\n".join(re.findall(r"expr: (.*?)\n\s+(?:for|labels):", rules, re.DOTALL)))
    assert len(alerts) >= 9, alerts
    assert alerts <= documented, alerts - documented
    assert DASHBOARDS
    for dashboard in DASHBOARDS:
        used = metrics_in(dashboard.read_text())
        assert len(used) >= 20, used
        assert used <= documented, used - documented


def test_every_alert_has_a_test() -> None:
    alerts = re.findall(r"alert: (\w+)", (DEPLOY / "alerts.yml").read_text())
    tests = Path(__file__).with_name("alerts.test.yml").read_text()
    fires = set(re.findall(r"alertname: (\w+)\n\s+exp_alerts:\n", tests))
    silent = set(re.findall(r"alertname: (\w+), exp_alerts: \[\]", tests))
    assert len(alerts) == len(set(alerts)) >= 10
    assert fires == set(alerts)
    assert silent == set(alerts)


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_are_explained_and_do_not_overlap(dashboard: Path) -> None:
    seen: set[tuple[int, int]] = set()
    ids = set()
    for panel in panels(dashboard):
        assert panel["title"], panel
        assert panel["description"], panel["title"]
        assert panel["targets"], panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}", panel["title"]
        place = panel["gridPos"]
        cells = {(x + place["x"], y + place["y"]) for x in range(place["w"]) for y in range(place["h"])}
        assert not seen & cells, panel["title"]
        seen |= cells
        ids.add(panel["id"])
    assert len(ids) == len(panels(dashboard)) >= 20
    assert max(x for x, _ in seen) < 24


def test_compose_mounts_what_is_there_and_prometheus_finds_the_server() -> None:
    compose = (DEPLOY / "docker-compose.yml").read_text()
    sources = re.findall(r"- (\./\S+?):", compose)
    assert len(sources) == 4
    for source in sources:
        assert (DEPLOY / source).exists(), source
    services = re.findall(r"^  (\w+):\n    image:", compose, re.MULTILINE)
    assert services == ["pellucid", "prometheus", "grafana"]
    assert 'targets: ["pellucid:9464"]' in (DEPLOY / "prometheus.yml").read_text()
    assert "url: http://prometheus:9090" in (DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text()
    folder = re.search(r"path: (\S+)", (DEPLOY / "grafana/provisioning/dashboards/pellucid.yml").read_text())
    assert folder is not None
    assert f"./grafana/dashboards:{folder[1]}:ro" in compose
    # Nothing is published beyond this machine.
    ports = re.findall(r'^      - "(.*:\d+)"$', compose, re.MULTILINE)
    assert len(ports) == 3
    assert all(port.startswith("127.0.0.1:") for port in ports), ports
