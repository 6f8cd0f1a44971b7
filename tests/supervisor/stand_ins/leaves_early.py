"""Ends with code 0 before anything was completed."""

from penstock.supervisor.child import Child
from stand_ins.waiting import until_running

if __name__ == "__main__":
    until_running(Child.from_environment())
