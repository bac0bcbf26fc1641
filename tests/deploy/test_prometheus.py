"""A real Prometheus scrapes a real server under load: every expression of dashboards and alerts has an answer.

Needs the programs `prometheus` and `promtool`; skipped elsewhere with the reason.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from pellucid_client import Client, InvalidRequest, PellucidError
from pellucid_testing.checkpoints import tiny_checkpoint
from pellucid_testing.server import ServerProcess, serve

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))
RANGE = "10m"
"""What stands for Grafana's $__rate_interval: more than all of this takes on any machine."""
REQUESTS = 40

pytestmark = [
    pytest.mark.skipif(
        shutil.which("prometheus") is None or shutil.which("promtool") is None,
        reason="prometheus and promtool are not installed",
    )
]


class Prometheus:
    """A running Prometheus with the configuration of deploy/, pointed at one server and scraping it often."""

    def __init__(self, folder: Path, target: str) -> None:
        config = (DEPLOY / "prometheus.yml").read_text()
        for old, new in (('"pellucid:9464"', f'"{target}"'), ("_interval: 5s", "_interval: 250ms")):
            assert config.count(old) == 1, old
            config = config.replace(old, new)
        config = config.replace("evaluation_interval: 15s", "evaluation_interval: 500ms")
        (folder / "prometheus.yml").write_text(config)
        shutil.copy(DEPLOY / "alerts.yml", folder)
        with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as probe:
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        self._log = folder / "prometheus.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address={self.address}",
                ],
                stdout=log,
                stderr=log,
            )

    def get(self, path: str, **parameters: str) -> Any:
        """The data of an answer of Prometheus' API."""
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            if error.code == 503:  # it is starting
                raise
            raise AssertionError(f"{path} {parameters}: {error.read().decode()}") from None

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of every series that an expression gives now."""
        result = self.get("query", query=expression)["result"]
        return [(sample["metric"], float(sample["value"][1])) for sample in result]

    def until(self, expression: str, seconds: float = 60) -> None:
        """Waits until an expression gives something."""
        end = time.monotonic() + seconds
        while True:
            with contextlib.suppress(OSError):
                if self.query(expression):
                    return
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < end, f"no answer to {expression} after {seconds} s:\n{self._log.read_text()}"
            time.sleep(0.1)

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(100)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def load(server: ServerProcess) -> int:
    """Requests of many kinds and ends, some of them refused. Returns how many tokens the answered ones have."""
    with Client(server.address) as client, ThreadPoolExecutor(8) as pool:

        def answer(seed: int) -> int:
            stream = client.generate("abc " * (1 + seed % 20), seed=seed, max_new_tokens=40, ignore_eos=True)
            return stream.result().usage.output_token_count

        tokens = sum(pool.map(answer, range(REQUESTS)))
        with pytest.raises(InvalidRequest):
            client.generate("abc", temperature=-1).result()
        with pytest.raises(PellucidError):
            client.generate("abc", model="nobody").result()
        client.tokenize("abc")
    return tokens


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Prometheus, int]]:
    """Prometheus after a load, and how many tokens that was."""
    checkpoint = tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny")
    with serve(checkpoint, "--speculative-tokens", "5") as server:
        prometheus = Prometheus(tmp_path_factory.mktemp("prometheus"), server.metrics_address)
        try:
            prometheus.until("pellucid_server_ready == 1")
            # Two rounds: a series that begins with its first call has a rate from its second on.
            tokens = load(server)
            prometheus.until('pellucid_requests_total{grpc_code="NOT_FOUND"} == 1')
            tokens += load(server)
            prometheus.until(f'rate(pellucid_requests_total{{grpc_code="NOT_FOUND"}}[{RANGE}]) > 0')
            prometheus.until('pellucid_requests_total{grpc_code="NOT_FOUND"} == 2')
            yield prometheus, tokens
        finally:
            prometheus.close()


def expressions() -> list[Any]:
    """Every expression of every panel, with Grafana's variables filled in."""
    found = []
    for dashboard in DASHBOARDS:
        for panel in json.loads(dashboard.read_text())["panels"]:
            for target in panel.get("targets", []):
                text = target["expr"].replace("$__rate_interval", RANGE)
                text = re.sub(r"\$(instance|model)\b", ".+", text)
                assert "$" not in text, text
                found.append(pytest.param(text, id=f"{panel['title']}: {target['refId']}"))
    return found


def test_prometheus_has_seen_what_the_client_has_seen(loaded: tuple[Prometheus, int]) -> None:
    prometheus, tokens = loaded
    assert tokens == 2 * REQUESTS * 40
    assert [value for _, value in prometheus.query("sum(pellucid_generated_tokens_total)")] == [tokens]
    assert [value for _, value in prometheus.query("sum(pellucid_request_rejections_total)")] == [4]


@pytest.mark.parametrize("expression", expressions())
def test_a_panel_has_something_to_show(loaded: tuple[Prometheus, int], expression: str) -> None:
    values = [value for _, value in loaded[0].query(expression)]
    if "pellucid_gpu_" in expression and not torch.cuda.is_available():
        pytest.skip("no GPU here, and so no series about one")
    assert any(math.isfinite(value) for value in values), f"{expression} gives {values}"


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.stem)
def test_the_variables_have_values(loaded: tuple[Prometheus, int], dashboard: Path) -> None:
    variables = [each for each in json.loads(dashboard.read_text())["templating"]["list"] if each["type"] == "query"]
    assert variables
    for variable in variables:
        match = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
        assert match is not None, variable
        found = loaded[0].query(match[1].replace("$instance", ".+"))
        assert found, variable
        assert all(labels.get(match[2]) for labels, _ in found), variable


def test_the_alerts_look_at_series_that_exist_and_are_silent_on_a_healthy_server(
    loaded: tuple[Prometheus, int],
) -> None:
    prometheus, _ = loaded
    end = time.monotonic() + 60
    while True:
        rules = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
        if all(rule["health"] != "unknown" for rule in rules) or time.monotonic() > end:
            break
        time.sleep(0.1)
    assert len(rules) >= 10
    for rule in rules:
        assert rule["health"] == "ok", rule
        # Calls to a model that is not there are errors, so one alert rightly waits for more of them.
        assert rule["state"] == "inactive" or (rule["name"], rule["state"]) == ("PellucidErrors", "pending"), rule
        selectors = re.findall(r"\b(?:pellucid_\w+|up)(?:\{[^}]*\})?", rule["query"])
        assert selectors, rule
        for selector in selectors:
            assert prometheus.query(selector), f"{rule['name']}: {selector} selects nothing"


def test_promtool_accepts_the_configuration() -> None:
    check("check", "config", str(DEPLOY / "prometheus.yml"))


def test_each_alert_fires_on_its_trouble_alone() -> None:
    check("test", "rules", str(Path(__file__).with_name("alerts.test.yml")))


def check(*arguments: str) -> None:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout, done.stdout
