"""python -m benchmarks.roofline [--device H100] [--write]: which MFU a GPU can reach at most, from shapes alone.

A step of a BERT encoder is a list of operations; each takes no less time than its arithmetic at the device's peak, and
no less than its bytes at its memory's bandwidth (Williams, Waterman and Patterson 2009, the roofline model). Their sum
bounds the step from below, and so MFU (model/metrics.py) from above. A second bound is the host's: eager PyTorch starts
the operations one by one, which takes LAUNCH each; CUDA graphs take that away.

Assumed: bf16 autocast with weights and residuals in fp32, attention that keeps no scores (FlashAttention, Dao et al.
2022, arXiv:2205.14135), each other operation a kernel of its own that reads and writes its tensors once, AdamW fused,
no communication. What it leaves out (tiles that don't fit, waves that don't fill, clocks) makes a device slower still.
"""

import argparse
import csv
import itertools
import sys
from dataclasses import dataclass

import numpy as np
import yaml

from benchmarks.common import between_marks, markdown
from lockstep.model.metrics import PEAKS_FILE, Shape, training_flops
from lockstep.paths import PROJECT
from lockstep.terminal import print_table

PAGE, MEASURED = PROJECT / "docs" / "performance.md", PROJECT / "docs" / "measurements"
MARKS = ("<!-- roofline: begin -->", "<!-- roofline: end -->")
BATCHES, WIDTHS = (8, 32, 128, 512), (32, 128, 512)  # samples in a step, tokens of each
LAUNCH = 5e-6  # seconds of the host for an operation: PyTorch's own overhead and CUDA's launch
LOW, FULL = 2, 4  # bytes of a number in bf16 and in fp32
# Tensors of tokens x width that a layer's forward pass reads or writes outside of matrix products: twice dropout (3
# with its mask), residual (3) and normalisation (2), in fp32; and GELU's, four times as wide, in bf16. Backward: twice
# those.
FORWARD_FULL, FORWARD_LOW = 2 * (3 + 3 + 2), 2 * 4
# A parameter in a step: cast (read, written), gradient written, its norm, its scaling (2), AdamW's four reads and three
# writes.
PARAMETER_BYTES = FULL + LOW + FULL * (1 + 1 + 2 + 4 + 3)
# Kernels of a layer in a step of eager PyTorch: 114 are counted on a CPU (43 of them casts), of which CUDA has dropout
# and attention in one each.
LAYER_OPERATIONS = 90


@dataclass(frozen=True)
class Encoder:
    """A BERT's shape."""

    layers: int = 12
    width: int = 768
    vocabulary: int = 21128  # bert-base-chinese's

    @property
    def shape(self) -> Shape:
        return Shape(12 * self.layers * self.width**2, self.width**2, self.layers, self.width)

    @property
    def parameters(self) -> int:
        return self.shape.encoder + self.shape.head + self.vocabulary * self.width


def step_seconds(encoder: Encoder, batch: int, tokens: int, peak: float, bandwidth: float) -> float:
    """The least time of a training step of `batch` texts of `tokens` each; peak in FLOP/s, bandwidth in bytes/s."""

    def least(flops: float, moved: float) -> float:
        return max(flops / peak, moved / bandwidth)

    rows, width = batch * tokens, encoder.width

    def product(inner: int, outer: int) -> float:
        """rows x inner times inner x outer: forward, and backward with respect to either."""
        moved = LOW * (rows * inner + inner * outer + rows * outer)
        return 3 * least(2 * rows * inner * outer, moved)

    attention = least(4 * rows * tokens * width, LOW * 4 * rows * width)
    # Backward: two products for each of forward's, and the scores computed again.
    attention += least(10 * rows * tokens * width, LOW * 8 * rows * width)
    elementwise = 3 * rows * width * (FORWARD_FULL * FULL + FORWARD_LOW * LOW) / bandwidth
    layer = 4 * product(width, width) + product(width, 4 * width) + product(4 * width, width) + attention + elementwise
    return encoder.layers * layer + encoder.parameters * PARAMETER_BYTES / bandwidth


def bounds(encoder: Encoder, batch: int, tokens: int, peak: float, bandwidth: float) -> tuple[float, float]:
    """The highest MFU that the device allows, and that which the host allows too when it starts each operation."""
    flops = training_flops(encoder.shape, np.full(batch, tokens))
    device = step_seconds(encoder, batch, tokens, peak, bandwidth)
    host = encoder.layers * LAYER_OPERATIONS * LAUNCH
    return flops / (device * peak), flops / (max(device, host) * peak)


def read_measured(device: str) -> dict[tuple[int, int], float]:
    """The MFU that was measured on a device, by tokens of a text and texts in a step: what MEASURED/<device>.csv says.

    Its columns are tokens, batch and mfu (a share of the peak, as in the report's summary.csv).
    """
    file = MEASURED / f"{device}.csv"
    if not file.is_file():
        return {}
    with file.open(encoding="utf-8") as stream:
        return {(int(line["tokens"]), int(line["batch"])): float(line["mfu"]) for line in csv.DictReader(stream)}


def lines(device: dict) -> list[list[str]]:
    measured = read_measured(device["name"])
    peak, bandwidth = device["tflops"]["bf16"] * 1e12, device["gigabytes_per_second"] * 1e9
    table = []
    for tokens, batch in sorted({*itertools.product(WIDTHS, BATCHES), *measured}):
        graphs, eager = bounds(Encoder(), batch, tokens, peak, bandwidth)
        reached = measured.get((tokens, batch))
        shown = "not measured" if reached is None else f"{100 * reached:.0f} %"
        table.append([str(tokens), str(batch), f"{100 * graphs:.0f} %", f"{100 * eager:.0f} %", shown])
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="H100", help="a name in workflow/devices.yaml")
    parser.add_argument("--write", action="store_true", help="put the table into docs/performance.md too")
    arguments = parser.parse_args()
    devices = yaml.safe_load(PEAKS_FILE.read_text(encoding="utf-8"))["devices"]
    known = {device["name"]: device for device in devices if "bf16" in device["tflops"]}
    if arguments.device not in known:
        parser.error(f"--device {arguments.device}: bf16's peak is known of {', '.join(known)}")
    header = ["tokens of a text", "texts in a step", "MFU at most", "started one by one", "measured"]
    table = lines(known[arguments.device])
    print_table(header, table)
    if arguments.write:
        about = f"BERT-base on one {arguments.device}, bf16 autocast."
        between_marks(PAGE, MARKS, f"{markdown(header, table)}\n\n{about}")


if __name__ == "__main__":
    sys.exit(main())
