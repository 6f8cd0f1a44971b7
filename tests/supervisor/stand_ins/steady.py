"""Ready at once, ends when asked to."""

from penstock.supervisor.child import Child

if __name__ == "__main__":
    child = Child.from_environment()

    async def serve() -> None:
        stop = child.stop_event()
        child.report_ready()
        await stop.wait()

    child.run(serve)
