"""From the address that a caller gives to a gRPC target and the options of its channel.

One server is HOST:PORT. Several servers that serve the same are a list of IP:PORT, "ipv4:IP:PORT,IP:PORT", or a name
that resolves to all of them, "dns:///NAME:PORT". Calls go to several in turn, those that do not answer or that say
NOT_SERVING left out.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Sequence

MAX_MESSAGE_BYTES = 16 * 2**20
HEALTH_SERVICE = "pellucid.v1.InferenceService"
_SCHEME = re.compile(r"(dns:(//[^/]*/)?|ipv4:|ipv6:)")
_HOST = re.compile(r"[\w.-]+|\[[0-9A-Fa-f:.]+(%[\w.-]+)?\]")

Options = list[tuple[str, int | str]]


def target(address: str | Sequence[str]) -> str:
    """The gRPC target. Raises ValueError for what is not an address, and for several that are not all IP:PORT of one
    family.
    """
    if isinstance(address, str):
        return _checked(address)
    if len(address) == 1:
        return _checked(address[0])
    families = {_family(each) for each in address}
    if len(families) != 1:
        raise ValueError(f"address: {list(address)} is not a list of IP:PORT, all IPv4 or all IPv6")
    return f"{families.pop()}:{','.join(address)}"


def channel_options(target: str) -> Options:
    """Limits and pings that suit long, sometimes silent streams, and how to choose among several servers."""
    options: Options = [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.max_pings_without_data", 0),  # 0: no limit, so that a long prefill does not end the pings.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
    ]
    addresses = _SCHEME.sub("", target, count=1).split(",")
    if all(_is_loopback(each) for each in addresses):
        options.append(("grpc.enable_http_proxy", 0))  # A proxy from the environment cannot reach our loopback.
    if names_several(target):
        options.append(("grpc.service_config", json.dumps(_SPREAD)))
    if len(addresses) > 1:
        # Else certificates would have to name the whole list.
        options.append(("grpc.default_authority", addresses[0]))
    return options


def names_several(target: str) -> bool:
    """Whether the target stands for a set of servers."""
    return target.startswith("dns:") or (target.startswith(("ipv4:", "ipv6:")) and "," in target)


# A server alone is not health-checked, so that its own reason for a refusal, and how long to wait, reach the caller.
_SPREAD = {
    "loadBalancingConfig": [{"round_robin": {}}],
    "healthCheckConfig": {"serviceName": HEALTH_SERVICE},
}


def _checked(address: str) -> str:
    scheme = _SCHEME.match(address)
    if address.startswith("unix:"):
        accepted = len(address) > len("unix:")
    elif scheme is None or scheme[0].startswith("dns:"):
        host, _, port = address[scheme.end() if scheme else 0 :].rpartition(":")
        accepted = _HOST.fullmatch(host) is not None and _is_port(port)
    else:
        family = scheme[0].removesuffix(":")
        accepted = all(_ip_family(each) == family for each in address[scheme.end() :].split(","))
    if not accepted:
        raise ValueError(
            f"address: {address!r} is not accepted; accepted: HOST:PORT with a port from 1 to 65535, such as "
            "127.0.0.1:50051 or [::1]:50051, 'dns:///NAME:PORT', and 'ipv4:IP:PORT,IP:PORT'"
        )
    return address


def _family(address: str) -> str:
    family = _ip_family(address)
    if family is None:
        raise ValueError(
            f"address: {address!r} is not IP:PORT; for several servers behind one name use 'dns:///NAME:PORT'"
        )
    return family


def _ip_family(address: str) -> str | None:
    """ "ipv4" or "ipv6"; None where the address is not IP:PORT, an IPv6 one in brackets."""
    host, _, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    try:
        version = ipaddress.ip_address(host[1:-1] if bracketed else host).version
    except ValueError:
        return None
    return f"ipv{version}" if _is_port(port) and bracketed == (version == 6) else None


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 5 and 1 <= int(text) <= 65535


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0]
    return host in ("localhost", "[::1]") or host.startswith("127.")
