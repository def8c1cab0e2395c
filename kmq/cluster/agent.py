"""`python -m kmq.cluster.agent [--with <pid>]`: the agent of this broker, in the foreground (kmq/fleet/agent.py)."""

import argparse
import sys

from kmq.broker.stats import AGENT
from kmq.broker.supervisor import end_with
from kmq.config.settings import load
from kmq.errors import EXIT_OK, ConfigError, KmqError, Stopped, of_os_error, pip_install
from kmq.files import keep_others_out
from kmq.logfmt import Logger


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m kmq.cluster.agent",
        description="Does for the broker of this directory's settings (environment, kmq.toml) what its fleet says over"
        " the Broadcast Queue. `kmq up` starts it by itself where KMQ_CLUSTER and KMQ_CONSUL are set.",
        epilog="example: KMQ_CLUSTER=dev KMQ_CONSUL=127.0.0.1:8500 python -m kmq.cluster.agent",
    )
    parser.add_argument(
        "--with", dest="supervisor", type=int, default=0, metavar="PID", help="the process that started the agent"
    )
    return parser.parse_args()


def main() -> int:
    """Run the agent to its end and return its exit code. A log line always says why it has ended."""
    supervisor = _arguments().supervisor
    keep_others_out()
    log = Logger(AGENT)
    try:
        if supervisor:
            end_with(supervisor)  # else it would go on alone
        try:
            from kmq.fleet.agent import Agent
        except ImportError as error:
            raise ConfigError(f"{error}; the agent needs: {pip_install('cluster')}") from error
        Agent(load(), log, supervisor).run()
        code, reason = EXIT_OK, "drained"
    except Stopped as err:
        code, reason = err.exit_code, str(err)
    except (KmqError, OSError) as err:
        failure = of_os_error(err) if isinstance(err, OSError) else err
        code, reason = failure.exit_code, str(failure)
        log.error("failed", exit_code=code, reason=reason)
    log.info("stopped", exit_code=code, reason=reason)
    return code


if __name__ == "__main__":
    sys.exit(main())
