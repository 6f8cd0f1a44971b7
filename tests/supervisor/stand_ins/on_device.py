"""Ready at once, with an accelerator; ends when asked to."""

from penstock.ports.process_launcher import Device
from penstock.supervisor.child import Child

if __name__ == "__main__":
    child = Child.from_environment()

    async def serve() -> None:
        stop = child.stop_event()
        child.report_ready(devices=[Device(name="H100", number="3", used_bytes=2 << 30, total_bytes=80 << 30)])
        await stop.wait()

    child.run(serve)
