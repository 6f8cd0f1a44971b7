"""What the tests do not depend on: how busy the machine is, and how they were started."""

import signal

from hypothesis import settings

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell has what it runs in the background ignore it, and so would the runs that tests interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
