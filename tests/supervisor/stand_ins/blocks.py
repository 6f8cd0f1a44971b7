"""Blocks its event loop in mid-run, the first time."""

import asyncio
import time

from penstock.supervisor.child import Child

if __name__ == "__main__":
    child = Child.from_environment()
    mark = child.run_dir / "blocked"

    async def serve() -> None:
        stop = child.stop_event()
        child.report_ready()
        if not mark.exists():
            await asyncio.sleep(0.2)
            mark.touch()
            time.sleep(1000)  # noqa: ASYNC251 - what must not happen
        await stop.wait()

    child.run(serve)
