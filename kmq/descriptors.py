"""How many files this process may have open: asked at the start, so that what is kept open fits in.

Nobody here uses select(), so the soft limit is raised to the hard one. What fits into that is up to the caller: connections
(ingress), logs (router).
"""

import resource

from kmq.errors import ConfigError

OWN = 48  # not for logs or connections: FIFOs, rings, listeners, epolls, locks, what is opened for a moment
LEAST = 64  # a process has to have: its own, and some for its work


def claim(least: int = LEAST) -> int:
    """Raise the limit as far as the system allows, and return it. Raises ConfigError where that is less than `least`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard < least:
        raise ConfigError(
            f"the limit on open files is {hard}; it must be at least {least} (ulimit -n, or LimitNOFILE of the unit)"
        )
    return hard
