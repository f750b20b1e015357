import numpy as np
import psutil
from torch.utils.data import DataLoader, Dataset

ROWS, READ = 2_000_000, 100_000  # numbers in the data, and in each sample


class Numbers(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return ROWS // READ

    def __getitem__(self, number):
        # A worker only looks at each number.
        for row in self.rows[number * READ : (number + 1) * READ]:
            _ = row
        # MiB that belong to this process alone.
        return psutil.Process().memory_full_info().uss / 2**20


if __name__ == "__main__":  # spawned workers import this file
    kinds = {"list": [float(row) for row in range(ROWS)], "array": np.arange(ROWS, dtype=float), "nothing": []}
    for method in ("fork", "spawn"):
        for kind, rows in kinds.items():
            loader = DataLoader(Numbers(rows), batch_size=None, num_workers=1, multiprocessing_context=method)
            first, *_, last = loader
            print(f"{method}, {kind}: {first:.0f} MiB at first, {last:.0f} MiB at the end", flush=True)
