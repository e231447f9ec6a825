"""Passes Ethernet frames between two interfaces, each some time later: what `tc netem delay` does, where there is none.

python delay.py ONE OTHER MILLISECONDS
"""

from __future__ import annotations

import select
import socket
import struct
import sys
import time
from collections import deque

SOL_PACKET, PACKET_ADD_MEMBERSHIP, PACKET_MR_PROMISC, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 1, 1, 15, 23
ETH_P_ALL, LARGEST = 3, 1 << 17


def tap(interface: str) -> socket.socket:
    """A socket that gets every frame which arrives at an interface, and sends frames out of it.

    With PACKET_VNET_HDR, what the sender has left to the hardware (checksums, segments) goes with the frame: it is
    neither right yet nor small enough to be sent without.
    """
    found = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    found.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    found.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    found.bind((interface, 0))
    every = struct.pack("IHH8s", socket.if_nametoindex(interface), PACKET_MR_PROMISC, 0, b"")
    found.setsockopt(SOL_PACKET, PACKET_ADD_MEMBERSHIP, every)
    return found


def main(one: str, other: str, milliseconds: str) -> None:
    """Pass on until killed."""
    taps = (tap(one), tap(other))
    opposite = {taps[0]: taps[1], taps[1]: taps[0]}
    under_way: deque[tuple[float, socket.socket, bytes]] = deque()
    while True:
        wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for arrived in select.select(taps, (), (), wait)[0]:
            under_way.append((time.monotonic() + float(milliseconds) / 1000, opposite[arrived], arrived.recv(LARGEST)))
        while under_way and under_way[0][0] <= time.monotonic():
            _, out, frame = under_way.popleft()
            out.send(frame)


if __name__ == "__main__":
    main(*sys.argv[1:])
