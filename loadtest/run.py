"""`make load`: a server of its own on free ports, a load test against it, and the load test's exit code.

usage: run.py [CHECKPOINT] [options of Locust and of docs/load-testing.md]

Without CHECKPOINT the bundled model is served; with --host no server is started. Options win over what is set here:
30 seconds, no web page, and 8 users in a closed loop. Order: the server starts, Locust runs, the server is stopped.
--help starts none.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pellucid_loadtest.options import add_flags
from pellucid_loadtest.own_server import StartError, leave_in_order_on_sigterm, own_server

LOCUSTFILE = Path(__file__).with_name("locustfile.py")
DEFAULTS = ("--headless", "--run-time", "30s", "--loglevel", "WARNING", "--only-summary")
CLOSED_LOOP_USERS = ("--users", "8", "--spawn-rate", "8")
HELP = ("-h", "--help")
VERSION = ("-V", "--version")
START_FAILED = 2


def main(arguments: Sequence[str]) -> int:
    leave_in_order_on_sigterm()
    checkpoint = list(arguments[:1]) if arguments and not arguments[0].startswith("-") else []
    options = list(arguments[len(checkpoint) :])
    if _given(options, *HELP):
        _print_help()
    if _given(options, *HELP, *VERSION):
        return _locust(options)
    users = () if _given(options, "--arrivals") else CLOSED_LOOP_USERS
    try:
        with contextlib.ExitStack() as stack:
            if not _given(options, "-H", "--host"):
                address = stack.enter_context(own_server(checkpoint)).address
                print(f"load: a server runs at {address}; now the test", file=sys.stderr)
                options = ["--host", address, *options]
            # Locust's own tables, whose percentiles are rounded, go there; ours follow on the terminal.
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            return _locust([*DEFAULTS, *users, "--json-file", os.path.join(folder, "locust"), *options])
    except StartError as error:
        print(f"load: the server did not start: {error}", file=sys.stderr)
        return START_FAILED
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _print_help() -> None:
    """What Locust's own help, which follows, leaves out: this script, and the flags of its locustfile."""
    as_it_is = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        usage=argparse.SUPPRESS, description=__doc__, formatter_class=as_it_is, add_help=False
    )
    add_flags(parser)
    print(parser.format_help().lstrip(), flush=True)


def _given(options: Sequence[str], *names: str) -> bool:
    return any(each == name or each.startswith(f"{name}=") for each in options for name in names)


def _locust(options: Sequence[str]) -> int:
    """Runs Locust to its end and returns its exit code."""
    process = subprocess.Popen([sys.executable, "-m", "locust", "--locustfile", str(LOCUSTFILE), *options])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Locust has had it too.
    with process:
        try:
            return process.wait()
        finally:
            process.terminate()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
