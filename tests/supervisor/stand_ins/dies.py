"""Refuses its configuration while starting."""

from penstock.supervisor.child import Child

if __name__ == "__main__":
    print("looking for the model")
    Child.from_environment().fail("there is no model at /nowhere")
