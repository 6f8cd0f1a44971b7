"""One module for each kind of process in a run. A module only connects the parts of its process to the control bus."""
