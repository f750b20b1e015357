import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
loss = torch.tensor([1.0 + rank])  # 1 on rank 0, 2 on rank 1

largest = loss.clone()  # a collective overwrites what it is given
# SUM is the default; there are also MIN and PRODUCT.
dist.all_reduce(largest, op=dist.ReduceOp.MAX)

total = loss.clone()
# Only rank 0 may use the result: what the others then hold is not defined.
dist.reduce(total, dst=0)

everyone = [torch.zeros(1) for _ in range(ranks)] if rank == 0 else None
dist.gather(loss, everyone, dst=0)

print(f"rank {rank}: largest {largest.item()}", flush=True)
if rank == 0:
    print(f"rank 0: mean {total.item() / ranks}, of {[one.item() for one in everyone]}", flush=True)
dist.destroy_process_group()
