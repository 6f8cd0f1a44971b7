"""One module per process of a run: each wires its parts to the control bus and does nothing else."""
