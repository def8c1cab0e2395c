"""Ten faults are named, with what to do, wherever an operator looks; an ordinary start, burst and stop are not."""

from contextlib import ExitStack

import pytest
import staged as stage
from brokers import Broker
from staged import Staged

PATIENCE_S = 60.0  # on a machine that does much else; alone each fault is named within 10 s, as the printed time shows
LASTING = ("restarting", "unclean_end", "slow_sync")  # they stay for a while, so that somebody sees them

FAULTS = {  # name: (how it is staged, code → a part of what to do)
    "a full disk": (stage.full_disk, {"disk_full": "make room on that disk"}),
    "a reached quota": (stage.reached_quota, {"quota": "raise KMQ_DATA_QUOTA"}),
    "a stopped stage": (stage.stopped_stage, {"silent": "kill -CONT "}),
    "a damaged block, read": (stage.damaged_block, {"damage_found": "kmq down && kmq verify --repair && kmq up"}),
    "a damaged block, verified": (stage.damage_verified, {"damage_found": "kmq verify names them"}),
    "an expired certificate": (stage.expired_certificate, {"certificate_expired": "replace the file and KMQ_TLS_KEY"}),
    "a missing file of tokens": (stage.missing_tokens, {"tokens_missing": "kmq token new <name>"}),
    "a clock set back": (stage.clock_set_back, {"clock_suspect": "kmq clock --trust", "clock_behind": "timedatectl"}),
    "a growing lag": (stage.growing_lag, {"group_stalled": "kmq groups list"}),
    "a slow disk": (stage.slow_sync, {"slow_sync": "iostat -x 1"}),
    "a crash loop": (stage.crash_loop, {"restarting": "event=failed", "unclean_end": "dmesg"}),
}


@pytest.fixture(scope="module")
def staged(tmp_path_factory, authority):
    directory = tmp_path_factory.mktemp("staged")
    with ExitStack() as cleanup:
        broker = Broker(directory / "broker")
        cleanup.callback(broker.close)
        yield Staged(broker, directory, authority, cleanup)


def wait_without_findings(staged):
    """Until no surface has a finding. Meanwhile only those are allowed that a machine without a moment to spare earns."""
    shown = {}

    def is_fine():
        shown.update({name: surface(staged) for name, surface in stage.SURFACES.items()})
        assert {code for codes in shown.values() for code in codes} <= {"silent", "slow_sync"}, shown
        return not any(shown.values())

    staged.broker.wait(is_fine, "nothing wrong on any surface")


def test_an_ordinary_start_a_burst_and_a_restart_are_no_findings(staged):
    broker = staged.broker
    wait_without_findings(staged)
    broker.run("kmq", "produce", "burst.k", text="x\n" * 200_000)
    broker.wait(lambda: int(broker.status()["router"]["seq"]) >= 200_000, "all is routed")
    assert stage.status_json(staged).keys() <= {"silent", "slow_sync"}
    broker.down()
    broker.up()
    wait_without_findings(staged)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_everywhere_with_what_to_do(staged, name):
    fault, advices = FAULTS[name]
    with fault(staged):
        took_s = stage.wait_named(staged, advices, PATIENCE_S)
        print(f"{name}: named by {', '.join(stage.SURFACES)} within {took_s:.1f} s")
    left = advices.keys() - {*LASTING}
    staged.broker.wait(lambda: left.isdisjoint(stage.readyz(staged)), "it is over")
