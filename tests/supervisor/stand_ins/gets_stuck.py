"""Gets stuck in a step, the first time; its event loop turns."""

from penstock.supervisor.child import Child

if __name__ == "__main__":
    child = Child.from_environment()
    mark = child.run_dir / "stuck"

    async def serve() -> None:
        stop = child.stop_event()
        child.report_ready()
        if not mark.exists():
            mark.touch()
            child.pulse(7, "Step")
        await stop.wait()

    child.run(serve)
