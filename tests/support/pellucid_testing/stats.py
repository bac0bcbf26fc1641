"""An engine's snapshot in few words."""

from __future__ import annotations

from typing import Any

from pellucid_server.engine.messages import Stats


def stats(**values: Any) -> Stats:
    """Of an engine with 16 free blocks, idle, where nothing else is said."""
    idle: dict[str, Any] = {
        "running": 0,
        "waiting": 0,
        "running_tokens": 0,
        "waiting_tokens": 0,
        "free_blocks": 16,
        "used_blocks": 0,
        "prefill_tokens_total": 0,
        "preemptions_total": 0,
        "step_sequences": 0,
        "step_tokens": 0,
        "step_seconds": 0.0,
        "step_phase": "idle",
    }
    return Stats(**(idle | values))
