"""A controller whose work is done as soon as the file `finish` lies in the run directory."""

import asyncio

from penstock.observe import jsonl
from penstock.supervisor.child import Child

if __name__ == "__main__":
    child = Child.from_environment()

    async def serve() -> None:
        stop = child.stop_event()
        child.report_ready()
        while not (child.run_dir / "finish").exists() and not stop.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        if not stop.is_set():
            jsonl.append(child.run_dir / "events.jsonl", {"event": "completed", "step": 3})

    child.run(serve)
