"""`python -m kmq.cluster.agent [--with <pid>]`: the agent of this broker, in the foreground (kmq/fleet/agent.py)."""

import sys

from kmq.broker.stats import AGENT
from kmq.broker.supervisor import run_beside
from kmq.config.settings import load
from kmq.errors import ConfigError, pip_install
from kmq.logfmt import Logger


def _run(log: Logger, supervisor: int) -> None:
    try:
        from kmq.fleet.agent import Agent
    except ImportError as error:
        raise ConfigError(f"{error}; the agent needs: {pip_install('cluster')}") from error
    Agent(load(), log, supervisor).run()


def main() -> int:
    """Run the agent to its end and return its exit code."""
    return run_beside(
        AGENT,
        "kmq.cluster.agent",
        _run,
        "Does for the broker of this directory's settings (environment, kmq.toml) what its fleet says over the Broadcast"
        " Queue. `kmq up` starts it by itself where KMQ_CLUSTER and KMQ_CONSUL are set.",
        "KMQ_CLUSTER=dev KMQ_CONSUL=127.0.0.1:8500 python -m kmq.cluster.agent",
    )


if __name__ == "__main__":
    sys.exit(main())
