"""What happened in a run that a person should hear of at once: an event as one line. Pure."""

from __future__ import annotations

from typing import Any

LONGEST = 200
"""Characters; the whole of it is in events.jsonl."""


def notice(event: dict[str, Any]) -> str | None:
    """None for what is as it should be."""
    match event:
        case {"event": "alarm", "reason": reason}:
            text = f"alarm: {reason}"
        case {"event": "server_lost", "why": why}:
            text = f"server lost: {why}"
        case {"event": "server_back", "url": url}:
            text = f"server back: {url}"
        case {"event": "stall", "waiter": waiter, "resource": resource, "holder": holder, "seconds": seconds}:
            text = f"stall: {waiter} has waited {seconds:.0f} s for {resource}, held by {holder}"
        case {"event": "process", "state": "degraded", "name": name, "reason": reason}:
            text = f"{name} is slow: {reason}"
        case {"event": "process", "state": "backoff", "name": name, "decision": decision}:
            text = f"{name} is started again: {decision}"
        case {"event": "rewound", "step": step, "lost_steps": lost}:
            text = f"the trainer went back to step {step}: {lost} steps are taken again"
        case {"event": "checkpoint_skipped", "path": path, "reason": reason}:
            text = f"checkpoint {path} is left aside: {reason}"
        case {"event": "checkpoint_missed", "reason": reason}:
            text = f"no last checkpoint: {reason}"
        case _:
            return None
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
