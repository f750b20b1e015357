"""Lightning Fabric. Start it by: python with_fabric.py"""

import torch
from lightning_fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

fabric = Fabric(accelerator="auto", devices=torch.cuda.device_count() or 2, strategy="ddp")
fabric.launch()  # this script once more for each further rank
fabric.seed_everything(0)
points = torch.randn(1024, 32)
data = TensorDataset(points, (points[:, 0] > 0).long())
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(DataLoader(data, batch_size=32, shuffle=True, drop_last=True))

for epoch in range(2):
    for inputs, labels in loader:  # on the device already
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        fabric.backward(loss)
        optimizer.step()
    fabric.print(f"epoch {epoch}: loss {loss.item():.3f}")
fabric.save("model.pt", {"model": model})
