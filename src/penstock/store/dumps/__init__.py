"""Export of trajectories from the pool: rows of declared columns, written one shard at a time."""
