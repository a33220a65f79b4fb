"""List the line charts of the page: which signals, below which heading, in which colour."""

from typing import NamedTuple

WIDE = frozenset({"loss", "grad_norm"})  # as wide as the page; the others stand beside each other
GROUPS = LEARNING, GRADIENTS, TIME, MACHINE, EXPERTS = (
    "Learning",
    "Gradients and updates",
    "Time",
    "Machine",
    "Experts",
)


class Line(NamedTuple):
    """A signal of a chart, as it is drawn."""

    signal: str
    label: str
    colour: str
    sampled: bool = False  # known on some steps only: the line goes from one to the next


class Chart(NamedTuple):
    name: str  # of its place in the page
    title: str
    unit: str
    lines: tuple[Line, ...]
    group: str = LEARNING  # the heading it stands below
    prefixes: bool = False  # of the axis: 40k


def _one(signal: str, label: str, *, sampled: bool = False) -> tuple[Line, ...]:
    return (Line(signal, label, "@lr", sampled),)


CHARTS = (
    Chart("loss", "Loss", "", (Line("loss", "loss", "@loss"),)),
    Chart("grad_norm", "Gradient norm", "global L2, before clipping", (Line("grad_norm", "grad norm", "@grad"),)),
    Chart("lr", "Learning rate", "", (Line("lr", "learning rate", "@lr"),)),
    Chart("loss_scale", "Loss scale", "", (Line("loss_scale", "loss scale", "@lr"),)),
    Chart(
        "update_ratio",
        "Update to weight",
        "of L2 norms, sampled",
        _one("update_ratio", "update / weight", sampled=True),
        GRADIENTS,
    ),
    Chart("clip", "Clipped", "share of the last 100 updates", _one("clip_fraction", "made smaller"), GRADIENTS),
    Chart(
        "zeros", "Gradient values that are 0", "share, sampled", _one("zeros_ratio", "zeros", sampled=True), GRADIENTS
    ),
    Chart(
        "step_time",
        "Step time",
        "s",
        (
            Line("step_seconds", "whole step", "@time"),
            Line("data_wait_seconds", "waiting for data", "@wait"),
        ),
        TIME,
    ),
    Chart("tokens", "Tokens per second", "all ranks together", _one("tokens_per_second", "tokens"), TIME, True),
    Chart("samples", "Samples per second", "all ranks together", _one("samples_per_second", "samples"), TIME, True),
    Chart("mfu", "Model FLOPs utilisation", "flops over the device's peak", _one("mfu_ratio", "MFU"), TIME),
    Chart(
        "memory",
        "Memory",
        "B",
        (
            Line("memory_reserved_bytes", "device, reserved", "@wait"),
            Line("memory_peak_bytes", "device, peak", "@grad"),
            Line("memory_allocated_bytes", "device, allocated", "@loss"),
            Line("host_memory_bytes", "host", "@time"),
        ),
        MACHINE,
    ),
    Chart(
        "gpu",
        "GPU utilisation",
        "ratio",
        (
            Line("gpu_utilization_highest", "busiest", "@time", sampled=True),
            Line("gpu_utilization_lowest", "idlest", "@lr", sampled=True),
        ),
        MACHINE,
    ),
    Chart("heat", "GPU temperature", "°C, of the hottest", _one("gpu_temperature", "hottest", sampled=True), MACHINE),
    Chart("power", "GPU power", "watts, all GPUs", _one("gpu_power", "power", sampled=True), MACHINE),
    Chart("cpu", "CPU utilisation", "ratio", _one("cpu_utilization", "all cores", sampled=True), MACHINE),
    Chart(
        "room",
        "Room left",
        "B",
        (
            Line("machine_memory_available", "host memory", "@time", sampled=True),
            Line("disk_free_home", "disk of the home", "@lr", sampled=True),
            Line("disk_free_cwd", "disk of the run's folder", "@grad", sampled=True),
        ),
        MACHINE,
    ),
    Chart(
        "network",
        "Network",
        "bytes per second",
        (
            Line("network_received", "received", "@loss", sampled=True),
            Line("network_sent", "sent", "@time", sampled=True),
        ),
        MACHINE,
        True,
    ),
    Chart("retransmits", "TCP retransmits", "per second", _one("tcp_retransmits", "TCP", sampled=True), MACHINE),
    Chart(
        "uneven",
        "Expert imbalance",
        "0 is even",
        _one("expert_imbalance", "most uneven router", sampled=True),
        EXPERTS,
    ),
)
