"""How many files this process may have open. A process asks at its start, and never keeps more open.

No code here uses select(), so the soft limit is raised to the hard limit. The caller divides it among its
connections (ingress) or logs (router).
"""

import resource

from kmq.errors import ConfigError

OWN = 48  # for FIFOs, rings, listeners, epolls, locks and short-lived files; the rest is for logs or connections
LEAST = 64  # descriptors that a process needs: OWN, and some for its work


def claim(least: int = LEAST) -> int:
    """Raise the limit as far as the system allows, and return it. Raises ConfigError if that is less than `least`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard < least:
        raise ConfigError(
            f"the limit on open files is {hard}; it must be at least {least} (ulimit -n, or LimitNOFILE of the unit)"
        )
    return hard
