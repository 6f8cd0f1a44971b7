"""A busy machine is no failure: property tests have no time limit of their own."""

from hypothesis import settings

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")
