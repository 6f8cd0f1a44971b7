"""The error for a wrong configuration."""

from penstock.redaction import redacted_text


class ConfigError(ValueError):
    """Something in the configuration is wrong. The message names the key, its place and the remedy, and shows no
    secret. Exit code 2."""

    def __init__(self, message: str) -> None:
        super().__init__(redacted_text(message))

    self_explanatory = True
    """The message needs no traceback; a process that ends with it shows the message alone."""
    exit_code = 2
    """Exit code of a command or process that ends with this error."""
