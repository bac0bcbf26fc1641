"""The Node client: its types, and its own tests against live servers.

The fixture `node` is the folder of node and npm, with the client built.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from pellucid_model.tokenizers import CharacterTokenizer
from pellucid_server.options import Integer
from pellucid_server.ranges import TOP_K
from pellucid_server.rpc.validation import MIN_TOKENS_PER_MESSAGE
from pellucid_server.rpc.validation_options import PRIORITY
from pellucid_server.served import MAX_SEQUENCES
from pellucid_testing.certificates import Authority
from pellucid_testing.checkpoints import tiny_checkpoint, tiny_config
from pellucid_testing.node import PACKAGE, run
from pellucid_testing.scripted_engine import Script
from pellucid_testing.server import ROOT, serve, start_server

from .test_retry import LETTERS


def passed(report: str) -> set[str]:
    """Names of the tests that a TAP report has as passed."""
    return set(re.findall(r"^ok \d+ - (.*)$", report, re.MULTILINE))


def declared(name: str) -> set[str]:
    source = (PACKAGE / "test" / name).read_text(encoding="utf-8")
    return set(re.findall(r'^test\("(.*?)"', source, re.MULTILINE))


def test_types(node: Path) -> None:
    run(node, "npm", "run", "check")


def test_ranges_are_the_servers() -> None:
    source = (PACKAGE / "src" / "requests.ts").read_text(encoding="utf-8")
    named = re.findall(r'check\.(?:count|integer)In\("([\w.]+)", \w+, ([-\d *]+), ([-\d *]+)\)', source)
    assert {path: Integer(_number(least), _number(most)) for path, least, most in named} == {
        "sampling.top_k": TOP_K,
        "sampling.sequence_count": Integer(1, MAX_SEQUENCES),
        "priority": PRIORITY,
        "output.min_tokens_per_message": MIN_TOKENS_PER_MESSAGE,
    }


def _number(text: str) -> int:
    """Of "-100" and "2 ** 31 - 1"."""
    power = re.fullmatch(r"2 \*\* (\d+) - 1", text)
    return int(text) if power is None else 2 ** int(power[1]) - 1


def test_against_a_live_server(node: Path, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "tiny", tiny_config(context_length=4096))
    template = "{% for message in messages %}{{ message.role }} {{ message.content }},{% endfor %}"
    (checkpoint / "chat_template.jinja").write_text(template)
    with serve(checkpoint, "--kv-cache-memory", "16MiB", "--threads", "1") as server:
        names = {"PELLUCID_SERVER": server.address, "PELLUCID_METRICS": server.metrics_address}
        report = run(
            node,
            "node",
            "--test",
            "--test-reporter=tap",
            "--test-force-exit",
            "dist/test/client.test.js",
            environment=names,
        )
        server.wait_for_metric("pellucid_requests_running", 0)
        assert server.metric("pellucid_requests_finished_total") > 30
    assert declared("client.test.ts") == passed(report)
    assert len(passed(report)) >= 21


def test_against_servers_in_trouble(node: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({}))
    CharacterTokenizer.train([LETTERS]).save(tmp_path)
    loading = Script(lives=str(tmp_path / "loading"), hang_after_steps=[0])
    holding = Script(lives=str(tmp_path / "holding"), step_seconds=0.01, token_pause_after=1)
    with serve(tmp_path, program=holding.program()) as dying:
        late = start_server(tmp_path, program=loading.program())
        try:
            late.load_until_refused(2)
            names = {
                "PELLUCID_LOADING": late.address,
                "PELLUCID_DYING": dying.address,
                "PELLUCID_DYING_PID": str(dying.process.pid),
            }
            report = run(node, "node", "--test", "--test-reporter=tap", "dist/test/faults.test.js", environment=names)
        finally:
            late.close()
    assert passed(report) == declared("faults.test.ts") != set()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_against_a_server_that_wants_a_certificate_and_a_token(node: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({}))
    CharacterTokenizer.train([LETTERS]).save(tmp_path)
    authority = Authority(tmp_path)
    own, client, tokens = authority.issue("server"), authority.issue("client"), tmp_path / "tokens"
    tokens.write_text("some.token-1==\n")
    flags = ["--tls-certificate", own.certificate, "--tls-key", own.key, "--tls-client-ca", authority.certificate]
    program = Script(lives=str(tmp_path / "lives")).program()
    with serve(tmp_path, *map(str, flags), "--auth-token-file", str(tokens), program=program) as server:
        names = {
            "PELLUCID_LOCKED": server.address,
            "PELLUCID_TOKEN": "some.token-1==",
            "PELLUCID_CA": str(authority.certificate),
            "PELLUCID_CERTIFICATE": str(client.certificate),
            "PELLUCID_KEY": str(client.key),
        }
        report = run(node, "node", "--test", "--test-reporter=tap", "dist/test/security.test.js", environment=names)
    assert passed(report) == declared("security.test.ts") != set()


def test_the_readmes_example_runs(node: Path) -> None:
    (example,) = re.findall(r"```js\n(.*?)```", (PACKAGE / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert "127.0.0.1:50051" in example
    with serve(None, "--kv-cache-memory", "16MiB", "--threads", "1") as server:
        code = example.replace("127.0.0.1:50051", server.address)
        printed = run(node, "node", "--input-type=module", "--eval", code)
        assert server.metric("pellucid_requests_finished_total") == 2
    assert re.search(r"(eos|max_new_tokens) \d+$", printed.strip())


def test_the_package_is_whole(node: Path) -> None:
    """What npm would publish: built code, types, the contract; no tests and no sources."""
    (packed,) = json.loads(run(node, "npm", "pack", "--dry-run", "--json", "--ignore-scripts"))
    files = {each["path"] for each in packed["files"]}
    assert {"package.json", "README.md", "dist/src/index.js", "dist/src/index.d.ts"} <= files
    contract = {path.name for path in (ROOT / "proto" / "pellucid" / "v1").glob("*.proto")}
    assert {Path(file).name for file in files if file.startswith("dist/proto/pellucid/v1/")} == contract
    assert not any("test" in Path(file).parts for file in files)


def test_the_lock_file_names_no_registry() -> None:
    lock = json.loads((PACKAGE / "package-lock.json").read_text(encoding="utf-8"))
    packages = {name: package for name, package in lock["packages"].items() if name}
    assert len(packages) > 20
    assert [name for name, package in packages.items() if "resolved" in package] == []
    assert all(package["integrity"].startswith("sha512-") for package in packages.values())
    version = json.loads((PACKAGE / "package.json").read_text(encoding="utf-8"))["version"]
    assert version == lock["version"] == lock["packages"][""]["version"]
