"""How much memory a server takes, beside what it cannot do without: its weights, and the KV cache that it has used."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

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


@dataclass(frozen=True)
class Resident:
    """Resident memory of one process by kind, in MiB."""

    huge_pages: float
    """Weights and KV cache, as far as the system had huge pages for them."""
    private: float
    """The rest of what is its own: objects, activations."""
    files: float
    """Program code and other files that are mapped; shared pages count whole."""

    @property
    def total(self) -> float:
        return self.huge_pages + self.private + self.files

    @classmethod
    def of(cls, pid: int) -> Resident:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        mib = {name: int(value.split()[0]) / 1024 for name, _, value in (line.partition(":") for line in lines)}
        huge = mib["AnonHugePages"]
        return cls(huge, mib["Anonymous"] - huge, mib["Rss"] - mib["Anonymous"])
