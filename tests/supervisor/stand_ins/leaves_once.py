"""Ends with code 0 in mid-run, the first time."""

from penstock.supervisor.child import Child
from stand_ins.waiting import until_running

if __name__ == "__main__":
    child = Child.from_environment()
    mark = child.run_dir / "left"

    async def serve() -> None:
        stop = child.stop_event()
        child.report_ready()
        await stop.wait()

    if mark.exists():
        child.run(serve)
    until_running(child)
    mark.touch()
