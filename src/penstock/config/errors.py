"""The one error a user sees for a bad configuration."""


class ConfigError(ValueError):
    """Something in the configuration is wrong; the message names the key, its place and the remedy. Exit code 2."""

    self_explanatory = True
    """The message needs no traceback; a process that ends with it shows the message alone."""
