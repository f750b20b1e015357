"""Measure the peak floating-point operations per second of this machine's CPU, from which utilisation is computed."""

from lockstep import cli
from lockstep.config.machine import cpu_cores
from lockstep.files import write_json
from lockstep.model import metrics
from lockstep.paths import peak_file


def main() -> None:
    arguments = cli.parser(__doc__).parse_args()
    config = cli.configuration(arguments)
    import torch

    torch.set_num_threads(cpu_cores())
    precisions = sorted({row.precision for row in config.rows.values() if row.hardware.device == "cpu"})
    peak = {precision: metrics.measure_cpu_peak(precision) for precision in precisions}
    write_json(peak_file(arguments.results), {"cores": cpu_cores(), "flops_per_second": peak})
    for precision, rate in peak.items():
        print(f"{precision}: {rate / 1e9:.0f} GFLOP/s on {cpu_cores()} cores")


if __name__ == "__main__":
    cli.run(main)
