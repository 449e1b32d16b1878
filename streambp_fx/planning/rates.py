"""How fast devices compute and exchange numbers: from data sheets, as a user gives it, or as it is measured.

The share of a link's rate is an assumption; for those of devices see `compute_rates`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..errors import PlanError
from ..passes.cost.work import Work
from .compute_rates import GPU, GPUS, ComputeRates, shares_of_peak
from .measured_rates import rates_here
from .place_rates import PlaceRates, disk_here

# Of a link's rate, for large collectives: nccl-tests show about 0.8 on NVLink.
LINK_EFFICIENCY = 0.8
WIDE = ("float32",)
HALF = ("bfloat16", "float16")
#: The name of the device that this process would use, whose rates are measured.
HERE = "here"
LINKS = ("nvlink", "pcie", "ib400")
IB400 = 400e9 / 8  # InfiniBand NDR: 400 Gbit/s in each direction, with one adapter for each device


@dataclass(frozen=True)
class Rates:
    """What the time of a step is predicted from.

    Attributes:
        compute: of each device.
        link: what connects the devices, in words.
        peak_bandwidth: bytes a second that a device sends, while it receives as many; 0: there is no other.
        link_efficiency: the share of that that is assumed.
        place: of what is offloaded; None: nothing is, or it is not known how fast.
    """

    compute: ComputeRates
    link: str = "none"
    peak_bandwidth: float = 0.0
    link_efficiency: float = LINK_EFFICIENCY
    place: PlaceRates | None = None

    def seconds(self, work: Work) -> float:
        """How long a device takes for some work, whose parts are numbers."""
        return self.compute.seconds(work)

    @property
    def bandwidth(self) -> float:
        """Bytes a second that a device sends."""
        return self.peak_bandwidth * self.link_efficiency

    def lines(self) -> list[str]:
        """What is assumed, for people."""
        found = list(self.compute.lines)
        if self.peak_bandwidth:
            rate = f"{self.peak_bandwidth / 1e9:,.4g} GB/s in each direction"
            found.append(f"{self.link}, {rate}, of which {self.link_efficiency:.0%} are assumed")
        return found if self.place is None else [*found, self.place.words]


def rates(
    gpu: str = "H100",
    dtype: str = "bfloat16",
    interconnect: str | float | None = None,
    flops: float | None = None,
    efficiency: float | None = None,
) -> Rates:
    """The rates of devices and of what connects them.

    Args:
        gpu: a name in `GPUS`, or "here": the device of this process, which is measured.
        dtype: of the weights; products are taken to be in it.
        interconnect: one of `LINKS`, or GB/s in one direction; None: there is one device.
        flops: floating-point operations a second, instead of those of the data sheet.
        efficiency: the share of the peak that products and attention reach; None: what they did on an H100.

    Raises:
        PlanError: an argument is not known, or no positive number; or the data sheet does not have the rate.
    """
    if gpu not in (*GPUS, HERE):
        names = f"{', '.join(GPUS)}, or {HERE}"
        raise PlanError(f"gpu must be one of {names}, not {gpu!r}: for another give flops")
    if efficiency is not None and not (_is_number(efficiency) and 0 < efficiency <= 1):
        raise PlanError(f"efficiency must be over 0 and at most 1, not {efficiency!r}")
    if flops is not None and not (_is_number(flops) and flops > 0):
        raise PlanError(f"flops must be a positive number, not {flops!r}")
    if gpu == HERE:
        return _rates_here(dtype, interconnect, flops, efficiency)
    device = GPUS[gpu]
    what, peak = f"{device.source}: {'float32' if dtype in WIDE else 'half precision, dense'}", flops
    if peak is not None:
        what = "as given"
    elif dtype in HALF or dtype in WIDE:
        peak = device.half if dtype in HALF else device.float32
    if peak is None:
        raise PlanError(f"no rate of a {gpu} in {dtype} is known: give flops")
    compute = shares_of_peak(what, peak, device.memory, efficiency)
    return Rates(compute, *(() if interconnect is None else _link(interconnect, device)))


def _is_number(given: Any) -> bool:
    return isinstance(given, (int, float)) and not isinstance(given, bool)


def _rates_here(
    dtype: str, interconnect: str | float | None, flops: float | None, efficiency: float | None
) -> Rates:
    if flops is not None or efficiency is not None:
        raise PlanError(f"gpu={HERE!r} measures what the device does: leave out flops and efficiency")
    if interconnect in LINKS:
        raise PlanError(
            f"what connects devices is not measured: give GB/s as interconnect, not {interconnect!r}"
        )
    return Rates(rates_here(dtype), *(() if interconnect is None else _given_link(interconnect)))


def rates_for(
    several: bool,
    gpu: str | None,
    interconnect: str | float | None,
    flops: float | None,
    efficiency: float | None,
    dtype: str,
    offload: str = "none",
) -> Rates | None:
    """The rates that a user asks for; None if neither several devices nor a device is given.

    Args:
        several: there are several devices.
        gpu, interconnect, flops, efficiency, dtype: see `rates`.
        offload: where what is kept may go: "none", "host" or "disk".

    Raises:
        PlanError: see `rates`, or what connects one device is given.
    """
    if not several and interconnect is not None:
        raise PlanError("interconnect is for several devices: give gpus and shard")
    if not several and gpu is None and flops is None:
        return None
    name = "H100" if gpu is None else gpu
    if several and interconnect is None:
        if name == HERE:
            raise PlanError("what connects devices is not measured: give interconnect, in GB/s")
        interconnect = "nvlink" if name not in GPUS or GPUS[name].nvlink else "pcie"
    found = rates(name, dtype, interconnect, flops, efficiency)
    return replace(found, place=_place(name, offload))


def _place(name: str, offload: str) -> PlaceRates | None:
    """How fast a device reaches a place, if that is known: a disk is that of this machine."""
    if offload == "disk":
        return disk_here() if name == HERE else None
    if offload == "none" or name == HERE:
        return None
    rate = GPUS[name].pcie * LINK_EFFICIENCY
    words = f"host memory by PCIe of a {name}, {rate / 1e9:,.4g} GB/s in each direction"
    return PlaceRates(rate, rate, True, words)


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
    return _given_link(interconnect)


def _given_link(interconnect: str | float) -> tuple[str, float]:
    """A link whose rate is given."""
    try:
        rate = float(interconnect)
    except ValueError:
        rate = -1.0
    if not 0 < rate < float("inf"):
        raise PlanError(
            f"interconnect must be one of {', '.join(LINKS)}, or GB/s in one direction, not {interconnect!r}"
        )
    return "as given", rate * 1e9
