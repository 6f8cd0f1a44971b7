"""The processes of a run without torch. The controller and the environment worker are the real ones."""
