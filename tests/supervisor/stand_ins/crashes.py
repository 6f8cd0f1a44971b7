"""Crashes in mid-run."""

from penstock.supervisor.child import Child
from stand_ins.waiting import until_running

if __name__ == "__main__":
    child = Child.from_environment()

    def main() -> None:
        until_running(child)
        raise RuntimeError("the tensor has the wrong shape")

    child.run(main)
