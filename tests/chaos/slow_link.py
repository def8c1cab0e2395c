"""Delays what this namespace sends to some addresses: a tc netem for kernels that have none. Needs root and /dev/net/tun.

    python -m chaos.slow_link OWN_ADDRESS SECONDS RECEIVER [RECEIVER …]

The routes to the receivers lead into a tun device. What comes out of it waits, and is sent on by the interface eth0, in
the order in which it came, so that nothing but time is changed. Device and routes go with this process.
"""

import fcntl
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_QUEUE = 10_000  # packets that wait in the device
NAME = "slow"


def open_device(own: str, receivers: list[str]) -> int:
    """Return the device that gets all packets for these receivers."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", NAME.encode(), _IFF_TUN | _IFF_NO_PI))
    for where in ("all", "eth0"):  # answers come by an interface to which no route leads
        Path(f"/proc/sys/net/ipv4/conf/{where}/rp_filter").write_text("0")
    subprocess.run(["ip", "link", "set", NAME, "up", "mtu", "1500", "txqueuelen", str(_QUEUE)], check=True)
    for receiver in receivers:
        subprocess.run(["ip", "route", "add", f"{receiver}/32", "dev", NAME, "src", own], check=True)
    return fd


def run(device: int, delay_s: float) -> None:
    wire = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"eth0")  # or the route leads back into the device
    waiting: deque[tuple[float, bytes]] = deque()
    while True:
        patience_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        if select.select([device], [], [], patience_s)[0]:
            with suppress(BlockingIOError):
                while True:
                    waiting.append((time.monotonic() + delay_s, os.read(device, 1 << 16)))
        while waiting and waiting[0][0] <= time.monotonic():
            _, packet = waiting.popleft()
            with suppress(OSError):  # cut off from there
                wire.sendto(packet, (socket.inet_ntoa(packet[16:20]), 0))


def main(own: str, delay_s: str, *receivers: str) -> None:
    device = open_device(own, list(receivers))
    print("ready", flush=True)
    run(device, float(delay_s))


if __name__ == "__main__":
    main(*sys.argv[1:])
