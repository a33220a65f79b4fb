"""How many dense bfloat16 operations a GPU can do in a second, by the name that torch gives it.

Whole names only: a slice of a GPU (MIG), a laptop's or a region's variant can do less than its namesake, and a wrong
peak is worse than none. Another device: settings `throughput.peak_flops_per_second`.
"""


def peak_named(name: str) -> float | None:
    """Operations per second of the device of this name; None for one that is not listed."""
    return _PEAKS.get(name.removeprefix("NVIDIA "))


# From the vendors' data sheets. Where a sheet tells the rate "with sparsity" it is halved: training is dense.
_PEAKS = {
    # NVIDIA A100, A800 (datasheet: 312 TFLOPS)
    **dict.fromkeys(("A100-SXM4-40GB", "A100-SXM4-80GB", "A800-SXM4-80GB"), 312e12),
    **dict.fromkeys(("A100-PCIE-40GB", "A100 80GB PCIe", "A800 80GB PCIe"), 312e12),
    # NVIDIA H100 (datasheet, with sparsity: SXM 1979, PCIe 1513, NVL 1671 TFLOPS), H200, GH200
    **dict.fromkeys(("H100 80GB HBM3", "H200", "GH200 480GB"), 989e12),
    "H100 PCIe": 756e12,
    **dict.fromkeys(("H100 NVL", "H200 NVL"), 835e12),
    # NVIDIA Blackwell (datasheet: HGX B200 2.25, GB200 2.5 PFLOPS a GPU)
    "B200": 2250e12,
    "GB200": 2500e12,
    # NVIDIA's PCIe cards (datasheets: A10 125, A30 165, A40 149.7, L4 242 with sparsity, L40 181.05, L40S 362.05)
    "A10": 125e12,
    "A30": 165e12,
    "A40": 149.7e12,
    "L4": 121e12,
    "L40": 181.05e12,
    "L40S": 362.05e12,
    # AMD (datasheets: MI300X and MI325X 1307.4 TFLOPS; MI250X 383 TFLOPS for its two devices)
    **dict.fromkeys(("AMD Instinct MI300X", "AMD Instinct MI325X"), 1307.4e12),
    "AMD Instinct MI250X": 191.5e12,
}
