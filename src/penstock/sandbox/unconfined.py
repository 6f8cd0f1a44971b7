"""The backend `none`: programs run as this user, with limits and without the run's environment, and nothing else.

Their init adopts what they leave behind and kills it. But a program can kill the init.
"""

from __future__ import annotations

import os
import subprocess
import tempfile


class WorkDirectory:
    """The work directory of a box. Inside a run it lies in the run's runtime directory, and is removed with it."""

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp(prefix="sandbox-", dir=os.environ.get("PENSTOCK_RUNTIME_DIR"))

    def close(self) -> None:
        """Remove the directory, however deep it is."""
        subprocess.run(["rm", "-rf", "--", self.path], check=False, capture_output=True)
