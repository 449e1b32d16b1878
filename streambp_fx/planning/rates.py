"""How fast devices compute and exchange numbers: peaks from data sheets, and what share of them is assumed.

Nothing here was measured with this package. The shares are assumptions that a user can change.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import PlanError

# Of the peak, for products and attention together with all that runs between them.
EFFICIENCY = 0.5
# Of a link's rate, for large collectives: nccl-tests show about 0.8 on NVLink.
LINK_EFFICIENCY = 0.8
WIDE = ("float32",)
HALF = ("bfloat16", "float16")


@dataclass(frozen=True)
class GPU:
    """A device, as its data sheet has it.

    Attributes:
        name: of it.
        half: floating-point operations a second of products in bfloat16 and float16, dense.
        float32: the same in float32, without TF32.
        nvlink: bytes a second in one direction between two devices by NVLink; 0: it has none.
        pcie: the same by PCIe, 16 lanes.
        source: the data sheet. Where it gives both directions of a link together, or the rate of sparse
            products, this is half of it.
    """

    name: str
    half: float
    float32: float
    nvlink: float
    pcie: float
    source: str


GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("A100", 312e12, 19.5e12, 300e9, 32e9, "NVIDIA A100 80GB (SXM), data sheet, 2021"),
        GPU("A800", 312e12, 19.5e12, 200e9, 32e9, "NVIDIA A800 80GB (SXM), data sheet, 2022"),
        GPU("H100", 989.5e12, 67e12, 450e9, 64e9, "NVIDIA H100 (SXM), data sheet, 2023"),
        GPU("H200", 989.5e12, 67e12, 450e9, 64e9, "NVIDIA H200 (SXM), data sheet, 2024"),
        GPU("L40S", 362e12, 91.6e12, 0, 32e9, "NVIDIA L40S, data sheet, 2023"),
    )
}
LINKS = ("nvlink", "pcie", "ib400")
IB400 = 400e9 / 8  # InfiniBand NDR: 400 Gbit/s in each direction, with one adapter for each device


@dataclass(frozen=True)
class Rates:
    """What a time is predicted from.

    Attributes:
        what: the device, in words.
        peak_flops: floating-point operations a second.
        efficiency: the share of them that is assumed.
        link: what connects the devices, in words.
        peak_bandwidth: bytes a second that a device sends, while it receives as many; 0: there is no other.
        link_efficiency: the share of that that is assumed.
    """

    what: str
    peak_flops: float
    efficiency: float
    link: str
    peak_bandwidth: float
    link_efficiency: float

    @property
    def flops(self) -> float:
        """Floating-point operations a second."""
        return self.peak_flops * self.efficiency

    @property
    def bandwidth(self) -> float:
        """Bytes a second."""
        return self.peak_bandwidth * self.link_efficiency

    def lines(self) -> list[str]:
        """What is assumed, for people."""
        peak = f"{self.peak_flops / 1e12:,.4g} TFLOP/s"
        found = [f"{self.what}, {peak}, of which {self.efficiency:.0%} are assumed"]
        if self.peak_bandwidth:
            rate = f"{self.peak_bandwidth / 1e9:,.4g} GB/s in each direction"
            found.append(f"{self.link}, {rate}, of which {self.link_efficiency:.0%} are assumed")
        return found


def rates(
    gpu: str = "H100",
    dtype: str = "bfloat16",
    interconnect: str | float | None = None,
    flops: float | None = None,
    efficiency: float = EFFICIENCY,
) -> Rates:
    """The rates of devices and of what connects them.

    Args:
        gpu: a name in `GPUS`.
        dtype: of the weights; products are taken to be in it.
        interconnect: one of `LINKS`, or GB/s in one direction; None: there is one device.
        flops: floating-point operations a second, instead of those of the data sheet.
        efficiency: the share of the peak that is assumed.

    Raises:
        PlanError: an argument is not known, or no positive number; or the data sheet does not have the rate.
    """
    if gpu not in GPUS:
        raise PlanError(f"gpu must be one of {', '.join(GPUS)}, not {gpu!r}: for another give flops")
    if not 0 < efficiency <= 1:
        raise PlanError(f"efficiency must be over 0 and at most 1, not {efficiency!r}")
    device = GPUS[gpu]
    what, peak = f"{device.source}: {'float32' if dtype in WIDE else 'half precision, dense'}", flops
    if peak is not None:
        what = "as given"
    elif dtype in HALF or dtype in WIDE:
        peak = device.half if dtype in HALF else device.float32
    if peak is None:
        raise PlanError(f"no rate of a {gpu} in {dtype} is known: give flops")
    if peak <= 0:
        raise PlanError(f"flops must be a positive number, not {flops!r}")
    link, bandwidth = ("none", 0.0) if interconnect is None else _link(interconnect, device)
    return Rates(what, peak, efficiency, link, bandwidth, LINK_EFFICIENCY)


def rates_for(
    several: bool,
    gpu: str | None,
    interconnect: str | float | None,
    flops: float | None,
    efficiency: float,
    dtype: str,
) -> Rates | None:
    """The rates that a user asks for; None if neither several devices nor a device is given.

    Args:
        several: there are several devices.
        gpu, interconnect, flops, efficiency, dtype: see `rates`.

    Raises:
        PlanError: see `rates`, or what connects one device is given.
    """
    if not several and interconnect is not None:
        raise PlanError("interconnect is for several devices: give gpus and shard")
    if not several and gpu is None and flops is None:
        return None
    name = "H100" if gpu is None else gpu
    if several and interconnect is None:
        interconnect = "nvlink" if name not in GPUS or GPUS[name].nvlink else "pcie"
    return rates(name, dtype, interconnect, flops, efficiency)


def _link(interconnect: str | float, gpu: GPU) -> tuple[str, float]:
    """What a link is called, and bytes a second in one direction."""
    if interconnect == "nvlink":
        if not gpu.nvlink:
            raise PlanError(f"a {gpu.name} has no NVLink: give pcie, ib400 or GB/s as interconnect")
        return f"NVLink of a {gpu.name}", gpu.nvlink
    if interconnect == "pcie":
        return f"PCIe of a {gpu.name}, 16 lanes", gpu.pcie
    if interconnect == "ib400":
        return "InfiniBand NDR, 400 Gbit/s for each device", IB400
    try:
        rate = float(interconnect)
    except ValueError:
        rate = -1.0
    if not 0 < rate < float("inf"):
        raise PlanError(
            f"interconnect must be one of {', '.join(LINKS)}, or GB/s in one direction, not {interconnect!r}"
        )
    return "as given", rate * 1e9
