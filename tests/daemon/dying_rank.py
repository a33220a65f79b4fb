"""A process that speaks as a rank, leaves a spool, says `ready`, and then waits to be killed."""

import os
import sys
from pathlib import Path

from sentinel import wire
from sentinel.records import Reflex
from sentinel.vocabulary import Action, Kind, Outcome
from tests.daemon.wire_client import WireClient


def main(path: str, spools: str, run_id: str, mode: str) -> None:
    client = WireClient(Path(path), run_id)
    if mode == "spool-only":
        client.socket = None
    else:
        client.connect()
    client.start()
    client.steps(1, 10)
    if mode != "spool-only":
        client.all_stored()
    sent = len(client.unacked)
    spooled = [message for message in client.unacked if message.delivery == "critical"]
    client.seq += 3  # telemetry that was never sent
    spooled.append(
        Reflex(client.number(), 1.0, 0, 14, Kind.NONFINITE_GRADIENT, Action.SKIP_UPDATE, Outcome.APPLIED, 1)
    )
    client.seq += 2
    if mode == "connected":
        client.beat(step=16)
    name = Path(spools) / f"{run_id}.0.{client.nonce}.spool"
    torn = wire.encode(spooled[-1])[:-3] if mode == "spool-only" else b""
    name.write_bytes(b"".join(map(wire.encode, [client.hello(), *spooled])) + torn)
    if mode == "forked" and os.fork() == 0:  # a worker that keeps the socket open
        sys.stdin.read()
        os._exit(0)
    print(f"ready {sent}", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
