"""Notices for people: alarms, stalls, losses, and how the run recovered. The module only formats events."""

from __future__ import annotations

from typing import Any

ENDED = (None, "ok", "killed_by_supervisor", "lost")
"""Kinds of process end without a notice of their own: a normal end, or an end together with the supervisor, which has
one notice for all."""
DEATH_RECORDERS = ("janitor", "resume")
"""Actors that record the death of a supervisor."""
LONGEST = 200
"""Longest notice in characters; the full text is in events.jsonl."""
TEXTS = {
    "alarm": "alarm: {reason}",
    "server_lost": "server lost: {why}",
    "server_back": "server back: {url}",
    "stall": "stall: {waiter} has waited {seconds:.0f} s for {resource}, held by {holder}",
    "process degraded": "{name} is slow: {reason}",
    "process exited": "{name} ended: {reason} ({kind})",
    "process backoff": "{name} is started again: {decision}",
    "process fatal": "{name} is not started again",
    "state failed": "{reason}",
    "adopted": "another controller continues at step {step}",
    "resumed": "resumed at step {step}: {revived} groups are trained again",
    "went_on": "continues after {tasks} tasks",
    "rewound": "the trainer went back to step {step}: {lost_steps} steps are taken again",
    "checkpoint_skipped": "checkpoint {path} is not used: {reason}",
    "checkpoint_missed": "no last checkpoint: {reason}",
    "pool_lost": "the pool is gone: groups that were not trained until step {step} are lost",
    "payloads_lost": "the tokens of {num_groups} groups are damaged: they are played again",
    "given_up": "task {task} leaves no row (correct it, and play it in another run): {reason}",
    "early_stop": "training ended at step {step}, because nothing more is learnt (scheduler.early_stop): {reason}",
    "validation_skipped": "no validation after step {step}: {reason}",
    "attached": "{name} has joined",
    "left": "{name} is gone: {reason}",
    "leftovers": "left behind: {names}",
}
"""Event, with its new state if it is a change of state -> its notice. Other events are normal."""


def notice(event: dict[str, Any]) -> str | None:
    """Return the event as one line; None if the event is normal."""
    name = event.get("event")
    match event:
        case {"event": "process", "state": state}:
            name = None if state == "exited" and event.get("kind") in ENDED else f"process {state}"
        case {"event": "state", "to": state, "actor": actor}:
            name = f"state {state}" if actor in DEATH_RECORDERS else None
        case {"event": "payloads_lost", "groups": groups}:
            event = event | {"num_groups": len(groups)}
        case {"event": "leftovers", "leftovers": leftovers}:
            event = event | {"names": ", ".join(leftovers)}
    try:
        return shortened(TEXTS[name].format_map(event)) if name in TEXTS else None
    except (KeyError, TypeError, ValueError):  # another version wrote the event
        return None


def shortened(text: str) -> str:
    """Return `text` on one line, cut to `LONGEST` characters."""
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def failures(groups: int, latest: str | None) -> str:
    """Return the number of failed groups and the reason of the latest failure."""
    return f"{groups} group{'s' * (groups != 1)} failed, the latest: {shortened(latest or '-')}"
