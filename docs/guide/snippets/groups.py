import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()

# Every rank makes every group, in the same order, even those that it does not belong to.
pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
mine, other = pairs[rank // 2], pairs[1 - rank // 2]

total = torch.tensor([rank])
dist.all_reduce(total, group=mine)
first = torch.tensor([rank])
# `src` is a number among all ranks, not in the group.
dist.broadcast(first, src=rank // 2 * 2, group=mine)

places = f"{dist.get_rank(mine)} in its pair, {dist.get_rank(other)} in the other"
print(f"rank {rank}: {places}; sum {total.item()}, first {first.item()}", flush=True)
dist.destroy_process_group()
