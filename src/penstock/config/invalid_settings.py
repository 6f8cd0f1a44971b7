"""The error for a wrong configuration."""


class ConfigError(ValueError):
    """Something in the configuration is wrong. The message names the key, its place and the remedy. Exit code 2."""

    self_explanatory = True
    """The message needs no traceback; a process that ends with it shows the message alone."""
    exit_code = 2
    """Exit code of a command or process that ends with this error."""
