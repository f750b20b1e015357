"""Precisions: what each computes in, how far rounding in it may go, and what a CPU's peak in it is measured by.

A precision is one entry here. Whoever asks for another gets a message, never full precision in silence.
"""

from dataclasses import dataclass

from lockstep.errors import BadInput


@dataclass(frozen=True)
class Precision:
    name: str
    dtype: str  # of PyTorch, in which a forward pass multiplies matrices
    autocast: bool = False  # weights stay in float32, and PyTorch's autocast casts what a forward pass multiplies
    scaled: bool = False  # the loss is multiplied, as the dtype would lose small gradients
    of_rows: bool = True  # whether a row may train in it; else only the proof does
    # As little as this counts as rounding in the proof: chance can make a measured floor zero, as the first gradient's
    # norm shows. None: rounding is not measured.
    least_floor: float | None = None
    # How far above the measured floor a row may be. The floor of one order of sums is mostly within a factor of two of
    # another's, and was 11 below a row of three ranks once (ModernBERT). In fp32 the mildest mistakes are some ten
    # thousand times above the floor; in reduced precision a few times only, which leaves less room.
    tolerance: float | None = None  # / floor
    matrix: int | None = None  # rows of the square matrices that measure a CPU's peak

    @property
    def frameworks(self) -> str:
        """What Accelerate and others call this precision, where they autocast."""
        return self.name if self.autocast else "no"

    @property
    def proof(self) -> str:
        """What the proof calls a row that is within the tolerance."""
        return "within-tolerance" if self.autocast else "equal"


DECLARED = (
    Precision("fp64", "float64", of_rows=False),  # in which rounding hides no mistake
    Precision("fp32", "float32", least_floor=1e-6, tolerance=100, matrix=1024),
    Precision("bf16", "bfloat16", autocast=True, least_floor=1e-4, tolerance=3, matrix=1024),
    Precision("fp16", "float16", autocast=True, scaled=True, least_floor=1e-5, tolerance=3, matrix=512),
)
PRECISIONS = {precision.name: precision for precision in DECLARED}
# What `amp` stands for, by the device. fp16 on a CPU is 10 to 17 times slower than fp32, so it is bf16 there.
AMP = {"cuda": "fp16", "cpu": "bf16"}


def of(name: str) -> Precision:
    """The precision of this name. Raises BadInput where there is none."""
    if name not in PRECISIONS:
        raise BadInput(f"precision: {name!r} is none. Take one of {', '.join(PRECISIONS)}.")
    return PRECISIONS[name]
