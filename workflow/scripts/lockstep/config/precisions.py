"""Precisions: the type that each computes in, its tolerance in the proof, and how a CPU's peak in it is measured.

Each precision is one entry here, from which its names in frameworks follow, too. An unknown precision raises an error,
and is never silently replaced by fp32.
"""

from dataclasses import dataclass

from lockstep.errors import BadInput


@dataclass(frozen=True)
class Precision:
    name: str
    dtype: str  # PyTorch's type in which a forward pass multiplies matrices
    fabric: str  # its name in Lightning Fabric
    autocast: bool = False  # whether weights stay in float32, and PyTorch's autocast casts in the forward pass
    scaled: bool = False  # whether the loss is scaled, since small gradients would underflow
    of_rows: bool = True  # whether a row may train in it; otherwise only the proof does
    # The smallest floor in the proof, since a measured floor, such as that of the first gradient's norm, may be zero by
    # chance. None: rounding is not measured.
    least_floor: float | None = None
    # How many times the measured floor a row may be away. The floors of two orders of sums usually differ by a factor
    # of up to two; once a row of three ranks was 11 times its floor away (ModernBERT). The mildest mistakes are some
    # ten thousand times the floor away in fp32, but only a few times in reduced precision, which leaves less room.
    tolerance: float | None = None
    matrix: int | None = None  # the size of the square matrices that measure a CPU's peak

    @property
    def frameworks(self) -> str:
        """The name of this precision for Accelerate's mixed_precision and the like; "no" without autocast."""
        return self.name if self.autocast else "no"

    @property
    def weights(self) -> str:
        """PyTorch's type of the weights that are trained, and of the loss."""
        return "float32" if self.autocast else self.dtype

    @property
    def proof(self) -> str:
        """The proof's verdict on a row that is within the tolerance."""
        return "within-tolerance" if self.autocast else "equal"


DECLARED = (
    Precision("fp64", "float64", "64-true", of_rows=False),  # so precise that rounding hides no mistake
    Precision("fp32", "float32", "32-true", least_floor=1e-6, tolerance=100, matrix=1024),
    Precision("bf16", "bfloat16", "bf16-mixed", autocast=True, least_floor=1e-4, tolerance=3, matrix=1024),
    Precision("fp16", "float16", "16-mixed", autocast=True, scaled=True, least_floor=1e-5, tolerance=3, matrix=512),
)
PRECISIONS = {precision.name: precision for precision in DECLARED}
MIXED = tuple(precision.name for precision in DECLARED if precision.autocast)
# The precision that `amp` stands for, by device. More CPUs have instructions for bf16 than for fp16, without which each
# takes several times as long as fp32 (docs/performance.md).
AMP = {"cuda": "fp16", "cpu": "bf16"}


def of(name: str) -> Precision:
    """The precision of this name. Raises BadInput if there is none."""
    if name not in PRECISIONS:
        raise BadInput(f"precision: {name!r} is unknown. Choose one of {', '.join(PRECISIONS)}.")
    return PRECISIONS[name]


def switches(name: str) -> dict[str, bool]:
    """For each mixed precision, whether it is the one called `name`: the flags that Trainer and DeepSpeed have."""
    return {mixed: mixed == name for mixed in MIXED}
