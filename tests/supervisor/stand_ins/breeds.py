"""Leaves two grandchildren that try to get away: one in another session, one that also forgot its environment."""

import subprocess
import sys

from penstock.supervisor.child import Child

SLEEP = "import os, sys, signal; print(os.getpid(), flush=True); signal.signal(15, signal.SIG_IGN); signal.pause()"

if __name__ == "__main__":
    child = Child.from_environment()
    for environment in (None, {}):
        escapee = subprocess.Popen(
            [sys.executable, "-c", SLEEP], env=environment, start_new_session=True, stdout=subprocess.PIPE
        )
        (child.run_dir / f"escapee-{escapee.stdout.readline().decode().strip()}").touch()

    async def serve() -> None:
        stop = child.stop_event()
        child.report_ready()
        await stop.wait()

    child.run(serve)
