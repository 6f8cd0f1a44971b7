"""A controller that finishes its work as soon as everybody runs."""

from penstock.observe import jsonl
from penstock.supervisor.child import Child
from stand_ins.waiting import until_running

if __name__ == "__main__":
    child = Child.from_environment()
    until_running(child)
    jsonl.append(child.run_dir / "events.jsonl", {"event": "completed", "step": 3})
