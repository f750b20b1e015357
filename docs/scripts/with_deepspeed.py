"""DeepSpeed, ZeRO stage 3. Start it by: torchrun --standalone --nproc-per-node 2 with_deepspeed.py"""

import deepspeed
import torch
from torch import nn
from torch.utils.data import TensorDataset

settings = {
    "train_micro_batch_size_per_gpu": 32,  # the batch of one rank
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 3},  # parameters, gradients and optimizer state are sharded
}
deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")

torch.manual_seed(0)
points = torch.randn(1024, 32)
data = TensorDataset(points, (points[:, 0] > 0).long())
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 2))
engine, _, loader, _ = deepspeed.initialize(  # the loader gives each rank a part of the data
    model=model, model_parameters=model.parameters(), training_data=data, config=settings
)

for epoch in range(2):
    loader.data_sampler.set_epoch(epoch)
    for inputs, labels in loader:
        inputs, labels = inputs.to(engine.device), labels.to(engine.device)
        loss = nn.functional.cross_entropy(engine(inputs), labels)
        engine.backward(loss)
        engine.step()  # clears the gradients, too
    if engine.global_rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.3f}")
engine.save_checkpoint("checkpoint")  # by all ranks; its zero_to_fp32.py makes one file of it
