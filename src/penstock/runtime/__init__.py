"""Child processes, HTTP servers and file transfer that connect the processes of a run."""
