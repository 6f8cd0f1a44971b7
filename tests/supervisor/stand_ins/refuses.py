"""Finds in mid-run that its configuration cannot be right."""

from penstock.supervisor.child import CONFIG_ERROR, Child
from stand_ins.waiting import until_running

if __name__ == "__main__":
    child = Child.from_environment()
    until_running(child)
    child.fail("data.path has gone", CONFIG_ERROR)
