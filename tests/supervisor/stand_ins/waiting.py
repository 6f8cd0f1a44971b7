"""What several stand-ins do: wait until the whole run is running."""

import json
import time

from penstock.supervisor.child import Child


def until_running(child: Child) -> None:
    child.report_ready()
    while json.loads((child.run_dir / "state.json").read_text())["status"] != "running":
        time.sleep(0.01)
