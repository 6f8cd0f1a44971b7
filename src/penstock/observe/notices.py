"""What a person should hear of: alarms and stalls, what was lost, and how the run went on. Pure."""

from __future__ import annotations

from typing import Any

ENDED = (None, "ok", "killed_by_supervisor", "lost")
"""How processes end that nobody misses, or that ended with their supervisor, of which there is one line."""
UNDERTAKERS = ("janitor", "resume")
"""Who records the death of a supervisor."""
LONGEST = 200
"""Characters; the whole of it is in events.jsonl."""


def notice(event: dict[str, Any]) -> str | None:
    """The event as one line; None for what is as it should be."""
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
        case {"event": "process", "state": "exited", "name": name, "kind": kind, "reason": reason} if kind not in ENDED:
            text = f"{name} ended: {reason} ({kind})"
        case {"event": "process", "state": "backoff", "name": name, "decision": decision}:
            text = f"{name} is started again: {decision}"
        case {"event": "process", "state": "fatal", "name": name}:
            text = f"{name} is not started again"
        case {"event": "state", "to": "failed", "actor": actor, "reason": reason} if actor in UNDERTAKERS:
            text = reason
        case {"event": "adopted", "step": step}:
            text = f"another controller goes on at step {step}"
        case {"event": "resumed", "step": step, "revived": revived}:
            text = f"resumed at step {step}: {revived} groups are trained again"
        case {"event": "went_on", "tasks": tasks}:
            text = f"goes on after {tasks} tasks"
        case {"event": "rewound", "step": step, "lost_steps": lost}:
            text = f"the trainer went back to step {step}: {lost} steps are taken again"
        case {"event": "checkpoint_skipped", "path": path, "reason": reason}:
            text = f"checkpoint {path} is left aside: {reason}"
        case {"event": "checkpoint_missed", "reason": reason}:
            text = f"no last checkpoint: {reason}"
        case {"event": "pool_lost", "step": step}:
            text = f"the pool is gone: what was played and not trained until step {step} is given up"
        case {"event": "payloads_lost", "groups": groups}:
            text = f"the tokens of {len(groups)} groups are damaged: they are played again"
        case {"event": "given_up", "task": task, "reason": reason}:
            text = f"task {task} leaves no row (mend it, and play it in another run): {reason}"
        case {"event": "validation_skipped", "step": step, "reason": reason}:
            text = f"no validation after step {step}: {reason}"
        case {"event": "attached", "name": name}:
            text = f"{name} has joined"
        case {"event": "left", "name": name, "reason": reason}:
            text = f"{name} is gone: {reason}"
        case {"event": "leftovers", "leftovers": leftovers}:
            text = f"left behind: {', '.join(leftovers)}"
        case _:
            return None
    return shortened(text)


def shortened(text: str) -> str:
    """For a line among others."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def failures(groups: int, latest: str | None) -> str:
    """Groups that were given up, and why the latest was."""
    return f"{groups} group{'s' * (groups != 1)} failed, the latest: {shortened(' '.join((latest or '-').split()))}"
