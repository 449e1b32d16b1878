"""How fast devices compute: peaks from data sheets, and what share of them steps reach.

NOTE [shares of the peak]: those of products, attention and memory are what steps of a model with the sizes of
Qwen3-8B reached on an H100 (docs/gpu.md); a user can give others, or have a machine measured
(`measured_rates`).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..passes.cost.work import Work

# Of the peak of products in the dtype of the weights.
PRODUCTS, ATTENTION, ATTENTION_BACKWARD = 0.85, 0.65, 0.55
# Of the memory's rate.
MEMORY = 0.65
# Seconds in which Python launches an op on a GPU: steps of 55,000 and 84,000 ops took 1.76 and 1.62 s on a
# machine with an H200.
LAUNCH = 22e-6
# Seconds that a program takes besides its ops, as on two cores (`python -m benchmarks.overhead`, where an op
# takes 5 us).
PROGRAM = 0.43e-3


@dataclass(frozen=True)
class GPU:
    """A device, as its data sheet has it.

    Attributes:
        name: of it.
        half: floating-point operations a second of products in bfloat16 and float16, dense.
        float32: the same in float32, without TF32.
        memory: bytes a second that it reads or writes.
        nvlink: bytes a second in one direction between two devices by NVLink; 0: it has none.
        pcie: the same by PCIe, 16 lanes.
        source: the data sheet. Where it gives both directions of a link together, or the rate of sparse
            products, this is half of it.
    """

    name: str
    half: float
    float32: float
    memory: float
    nvlink: float
    pcie: float
    source: str


GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("A100", 312e12, 19.5e12, 2.039e12, 300e9, 32e9, "NVIDIA A100 80GB (SXM), data sheet, 2021"),
        GPU("A800", 312e12, 19.5e12, 2.039e12, 200e9, 32e9, "NVIDIA A800 80GB (SXM), data sheet, 2022"),
        GPU("H100", 989.5e12, 67e12, 3.35e12, 450e9, 64e9, "NVIDIA H100 (SXM), data sheet, 2023"),
        GPU("H200", 989.5e12, 67e12, 4.8e12, 450e9, 64e9, "NVIDIA H200 (SXM), data sheet, 2024"),
        GPU("L40S", 362e12, 91.6e12, 0.864e12, 0, 32e9, "NVIDIA L40S, data sheet, 2023"),
    )
}


@dataclass(frozen=True)
class ComputeRates:
    """What the time of a device's work is predicted from; see NOTE [what takes time] in `passes.cost.work`.

    Attributes:
        products, attention, attention_backward: floating-point operations a second.
        memory: bytes a second.
        call: seconds of an op that is called, whatever its size.
        program: the same of a program, besides its ops.
        lines: where they are from, for people.
        beside: what calls ops does so while the device computes: the longer of both counts.
    """

    products: float
    attention: float
    attention_backward: float
    memory: float
    call: float
    program: float
    lines: tuple[str, ...]
    beside: bool = False

    def seconds(self, work: Work) -> float:
        """How long a device takes for some work, whose parts are numbers."""
        computing = work.products / self.products + work.attention / self.attention
        computing += work.attention_backward / self.attention_backward
        computing += (work.product_bytes + work.bytes) / self.memory
        calling = work.calls * self.call + work.programs * self.program
        return float(max(computing, calling) if self.beside else computing + calling)


def shares_of_peak(what: str, peak: float, memory: float, efficiency: float | None) -> ComputeRates:
    """Rates that are shares of a peak.

    Args:
        what: the device, in words.
        peak: floating-point operations a second.
        memory: bytes a second.
        efficiency: the share of the peak that products and attention reach; None: what they did on an H100.
    """
    first, second, third = (
        (PRODUCTS, ATTENTION, ATTENTION_BACKWARD) if efficiency is None else (efficiency,) * 3
    )
    words = [f"{what}, {peak / 1e12:,.4g} TFLOP/s"]
    if efficiency is None:
        words.append(f"of which products get {first:.0%}, attention {second:.0%} and backwards {third:.0%}")
    else:
        words.append(f"of which {efficiency:.0%} are assumed")
    of_memory = f"its memory, {memory / 1e12:,.4g} TB/s, of which {MEMORY:.0%} are assumed"
    lines = ", ".join(words), of_memory, f"{LAUNCH * 1e6:.0f} us to launch an op, beside the device's work"
    rates = peak * first, peak * second, peak * third, memory * MEMORY
    return ComputeRates(*rates, LAUNCH, PROGRAM, lines, beside=True)
