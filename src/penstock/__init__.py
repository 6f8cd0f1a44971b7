"""Penstock: an asynchronous reinforcement-learning engine for LLM agents that schedules itself."""

__version__ = "0.1.0"
