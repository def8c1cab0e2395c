"""`python -m kmq.gateway [--with <pid>]`: the gateway alone, in the foreground."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

from kmq import files
from kmq.broker.data_directory import AGAIN, open_page
from kmq.broker.stats import Row
from kmq.broker.supervisor import run_beside
from kmq.config.settings import load
from kmq.errors import EXIT_OK, ConfigError, exit_code_of, pip_install
from kmq.links.ownership import FileLock, describe
from kmq.logfmt import Logger

_BEAT_S = 0.25
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_LEAST_FILES = 128  # descriptors for its listeners, its event loop and some connections


@contextlib.contextmanager
def _alive(row: Row) -> Iterator[None]:
    """Write heartbeats while modules load: on a busy machine that takes longer than a silence may."""
    is_over = threading.Event()

    def beat() -> None:
        while not is_over.wait(_BEAT_S):
            row.heartbeat = time.monotonic_ns()

    thread = threading.Thread(target=beat, name="kmq-alive", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        row.heartbeat = time.monotonic_ns()


def run(log: Logger, supervisor: int) -> None:
    settings = load()
    files.claim(_LEAST_FILES)  # a connection needs one, a connection of gRPC two
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)  # blocked by a run before this one, in place (AGAIN)
    page = open_page("gateway", settings, supervisor, log, lambda: bool(signals))
    os.makedirs(settings.pipes, exist_ok=True)
    owner = FileLock(f"{settings.pipes}/gateway.owner")
    owner.acquire("the gateway of this broker", describe("gateway", settings.data))
    row = page.rows["gateway"]

    def on_early_signal(number: int, frame: object) -> None:
        # While the modules load there is nothing to drain. An exception would be swallowed by one of them.
        row.end(EXIT_OK)
        log.info("stopped", exit_code=EXIT_OK, reason="told to stop before it was ready")
        os._exit(EXIT_OK)

    signal.signal(signal.SIGTERM, on_early_signal)
    if AGAIN not in sys.argv:
        row.begin(supervisor)
    if signals:
        on_early_signal(signal.SIGTERM, None)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC reports everything by exceptions too
    exit_code = EXIT_OK
    try:
        try:
            with _alive(row):
                import asyncio

                from kmq.gateway.server import Gateway
        except ImportError as err:
            raise ConfigError(f"{err}; the gateway needs: {pip_install('gateway')}") from err

        async def serve() -> None:
            gateway = Gateway(settings, page, log)
            if settings.shard:
                await gateway.follow()
            if not gateway.stopping.is_set():
                await gateway.run()
            signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS if gateway.has_left else ())
            if gateway.has_left and not gateway.stopping.is_set():
                # Within the loop: to end it would wait for threads, and let tasks answer clients once more.
                log.info("role_left")
                page.leave_role("gateway")
                more = [] if AGAIN in sys.argv else [AGAIN]
                os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:], *more])

        asyncio.run(serve())
    except Exception as err:
        exit_code = exit_code_of(err)
        raise
    finally:
        row.end(exit_code)
        owner.release()


def main() -> int:
    """Run the gateway to its end and return its exit code."""

    def work(log: Logger, supervisor: int) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            run(log, supervisor)

    return run_beside(
        "gateway",
        "kmq.gateway",
        work,
        "The HTTP and gRPC gateway of the broker of this directory's settings (environment, kmq.toml), in the foreground."
        " `kmq up` starts it by itself where the extra kmq[gateway] is installed.",
        "KMQ_HTTP_PORT=8082 python -m kmq.gateway",
    )


if __name__ == "__main__":
    sys.exit(main())
