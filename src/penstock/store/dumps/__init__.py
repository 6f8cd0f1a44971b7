"""Trajectories for others: rows of declared columns, made of what lies in the pool, written a shard at a time."""
