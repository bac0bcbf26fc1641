"""Load test of a Pellucid server:  locust -f loadtest/locustfile.py --host HOST:PORT

docs/load-testing.md says what it measures and lists the flags.
"""

# Before anything makes a channel: without it a gRPC call blocks every other user of the process.
import grpc.experimental.gevent

grpc.experimental.gevent.init_gevent()

from pellucid_loadtest.plugin import install  # noqa: E402
from pellucid_loadtest.users import GenerateUser  # noqa: E402

__all__ = ["GenerateUser"]

install()
