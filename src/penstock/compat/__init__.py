"""Foreign protocols in front of the rollout server: who speaks them need not know Penstock."""
