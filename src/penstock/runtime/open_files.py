"""How many files and connections a process may have open."""

from __future__ import annotations

import resource


def allow_files(most: int) -> int:
    """Raise the limit of open files to `most`, or as far as the system allows. Return how many are allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != soft < most:
        soft = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return most if soft == resource.RLIM_INFINITY else min(most, soft)
