"""How much memory a server takes, beside what it cannot do without: its weights, and the KV cache that it has used."""

from __future__ import annotations

from pellucid_benchmark.costs import Costs
from pellucid_benchmark.processes import resident_mib
from pellucid_benchmark.servers import PellucidServer

MIB = 2**20


def memory_of(server: PellucidServer, costs: Costs, most_tokens: int) -> dict[str, float]:
    """In MiB, of frontend and engine together.

    most_tokens  of all sequences at a time, since the start: so much of the cache has been used
    """
    return {
        "resident_mib": resident_mib(server.processes()),
        "weights_mib": costs.weight_bytes / MIB,
        "kv_cache_mib": most_tokens * costs.kv_token_bytes / MIB,
    }
