"""Ignores every request to end."""

import signal

from penstock.supervisor.child import Child

if __name__ == "__main__":
    child = Child.from_environment()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child.report_ready()
    while True:
        signal.pause()
