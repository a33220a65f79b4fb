"""A machine with two GPUs, an RDMA port and a control group, for Prometheus to scrape: real probes over stand-ins."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from sentinel.daemon.metrics import Metrics
from sentinel.daemon.probes.host import Host
from sentinel.daemon.probes.nvml import Nvml
from sentinel.daemon.probes.probe import Reading
from sentinel.daemon.probes.rdma import Rdma
from tests.daemon.probes.conftest import plant
from tests.daemon.probes.nvml_fake import FakeNvml, gpu

PORT = "sys/class/infiniband/mlx5_0/ports/1"
FILES = {
    f"{PORT}/counters/port_xmit_data": "1000\n",
    f"{PORT}/counters/link_downed": "2\n",
    "proc/pressure/memory": "some avg10=12.50 avg60=0.10 avg300=0.02 total=123\n",
    "proc/self/cgroup": "0::/\n",
    "sys/fs/cgroup/memory.max": "4294967296\n",
    "sys/fs/cgroup/memory.current": "1073741824\n",
    "sys/fs/cgroup/cpu.stat": "usage_usec 10\nthrottled_usec 2500000\n",
}


@contextmanager
def machine_target(folder: Path, targets: Path) -> Iterator[None]:
    """It answers on the loopback interface, and stands in the target list `targets`, until the end."""
    metrics = _metrics(plant(folder, FILES))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = metrics.render()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *args: object) -> None:
            del args

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        targets.write_text(json.dumps([{"targets": [f"127.0.0.1:{server.server_address[1]}"]}]))
        try:
            yield
        finally:
            server.shutdown()
            thread.join(10)


def _metrics(root: Path) -> Metrics:
    first, second = gpu("GPU-a"), gpu("GPU-b")
    fake = FakeNvml(first, second)
    probes = (Nvml(lambda: fake), Rdma(root / "sys"), Host(root=root))
    probes[0].read()
    fake.xid(second, 63)
    once = threading.Lock()  # a probe is never read twice at once

    def readings() -> list[Reading]:
        with once:
            return [reading for probe in probes for reading in probe.read()]

    metrics = Metrics()
    metrics.machine.readings = readings
    return metrics
