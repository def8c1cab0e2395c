"""Kills processes where a test says so: every Python program that has this directory in PYTHONPATH runs this first.

The file FAIL_POINT names a point and who dies there: `committed-written <pid> <pid>`. It is removed first, so it works once.
Points lie before and after calls of `Transactions` and its writer.
LIMITS changes constants that no test reaches as they are: `<module>:<name>[.<key>…]=<value> …`.
"""

import contextlib
import importlib.abc
import importlib.util
import os
import signal
import sys

DOOR = "kmq.gateway.kafka"


def reach(point):
    with contextlib.suppress(FileNotFoundError), open(os.environ.get("FAIL_POINT", "")) as file:
        name, *victims = file.read().split()
        if name == point:
            os.unlink(file.name)
            for victim in victims or [os.getpid()]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(victim), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)


def around(owner, name, point=lambda *_, **__: ""):
    """Let tests kill before and after each call of an async method."""
    method = getattr(owner, name)

    async def called(self, *args, **more):
        which = f"{name.lstrip('_')}{point(*args, **more)}"
        reach(f"before_{which}")
        found = await method(self, *args, **more)
        reach(f"after_{which}")
        return found

    setattr(owner, name, called)


def patch_transactions(module):
    for name in ("_init", "hold_offsets"):
        around(module.Transactions, name)


def patch_writer(module):
    around(module.TransactionWriter, "write_state", lambda txn, state, **_: f"_{state.state}")
    for name in ("store_offsets", "copy"):
        around(module.TransactionWriter, name)


def patch_units(module):
    send = module.Units.send

    def called(self, name, *args):
        found = send(self, name, *args)
        if name.startswith(b"t"):
            reach("copy_sent")  # in the socket, or on its way: nobody has answered
            found.add_done_callback(lambda _: reach("copy_stored"))
        return found

    module.Units.send = called


PATCHES = {
    f"{DOOR}.transactions": patch_transactions,
    f"{DOOR}.transaction_writer": patch_writer,
    f"{DOOR}.units": patch_units,
}


def patch_limit(change):
    """Let a word of LIMITS change its module."""
    place, _, text = change.partition("=")
    name, _, path = place.partition(":")
    *way, last = path.split(".")
    before = PATCHES.get(name)

    def patch(module):
        if before is not None:
            before(module)
        owner = vars(module)
        for step in way:
            owner = owner[step]
        owner[last] = type(owner[last])(text)

    PATCHES[name] = patch


for word in os.environ.get("LIMITS", "").split():
    patch_limit(word)


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name not in PATCHES:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        sys.meta_path.insert(0, self)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            PATCHES[name](module)

        spec.loader.exec_module = exec_module
        return spec


if "FAIL_POINT" in os.environ or "LIMITS" in os.environ:
    sys.meta_path.insert(0, Finder())
