"""Reports that it is ready, in the name of another process."""

import signal

from penstock.supervisor.child import Child

if __name__ == "__main__":
    child = Child.from_environment()
    child.nonce = "of another run"
    child.report_ready()
    signal.pause()
