"""Processes for the tests of supervision: quick, without torch, each with one habit."""
