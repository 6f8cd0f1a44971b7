"""Protocols of other software on the rollout server, for clients that do not know Penstock."""
