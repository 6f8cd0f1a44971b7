"""Rewards computed outside the environment (`env.reward`)."""
