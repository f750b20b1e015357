"""What `lockstep prove` costs the script that it records: time of a step, and memory."""

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.common import line
from lockstep.script import recording

STEPS = 8
# An encoder of 100 million weights. It notes when each step begins, and the most memory that it had until then.
SCRIPT = """
import json, resource, sys, time
import torch

class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = torch.nn.Embedding(20000, 768)
        layer = torch.nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True, dropout=0.0)
        self.layers = torch.nn.TransformerEncoder(layer, 12)
        self.head = torch.nn.Linear(768, 6)

    def forward(self, tokens):
        return self.head(self.layers(self.embeddings(tokens))[:, 0])

torch.manual_seed(0)
model = Classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
began, memory = [], []
for step in range(int(sys.argv[2])):
    began.append(time.perf_counter())
    memory.append(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    weights = sum(4 * weight.numel() for weight in model.parameters())
    with open(sys.argv[1], "w") as file:
        json.dump({"began": began, "memory": memory, "weights": weights}, file)
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(torch.randint(20000, (16, 64))), torch.randint(6, (16,)))
    loss.backward()
    optimizer.step()
"""


def recorder(folder: Path, keys: dict, rounds: int) -> list[list[str]]:
    """Steps of a script that is recorded over those of the same script alone, and the memory added, in copies."""
    place = folder / "recorder"
    place.mkdir()
    (place / "train.py").write_text(SCRIPT, encoding="utf-8")
    times, copies = [], []
    for number in range(rounds):
        noted = {name: place / f"{name}{number}.json" for name in ("alone", "recorded")}
        command = {name: [sys.executable, str(place / "train.py"), str(file)] for name, file in noted.items()}
        subprocess.run([*command["alone"], str(STEPS)], check=True)
        asked, where = recording.Asked(steps=STEPS), recording.Place(place, log=place / f"log{number}")
        recording.record([*command["recorded"], str(2 * STEPS)], place / f"recording{number}", asked, where)
        alone, recorded = (json.loads(file.read_text(encoding="utf-8")) for file in noted.values())
        times.append(_seconds(recorded) / _seconds(alone))
        copies.append((recorded["memory"][STEPS - 1] - alone["memory"][STEPS - 1]) / alone["weights"])
    return [
        line("a step of a script that `lockstep prove` records over the same alone, time (100M)", times, "at most 2"),
        line("the memory that recording adds, over that of the weights (100M)", copies, "at most 1"),
    ]


def _seconds(noted: dict) -> float:
    """From the second step, since the first one makes the optimizer's state, to the last."""
    return noted["began"][STEPS - 1] - noted["began"][1]
