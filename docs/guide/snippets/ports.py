import os
from pathlib import Path

import psutil
import torch.distributed as dist

dist.init_process_group("gloo")
first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
open_ports = {
    connection.laddr.port
    for connection in psutil.Process().net_connections("tcp")
    if connection.status == psutil.CONN_LISTEN
}
# Rank 0, or its torchrun, listens at that one.
others = open_ports - {int(os.environ["MASTER_PORT"])}
within = all(first <= port <= last for port in others)
print(f"rank {dist.get_rank()} listens at {len(others)} more port, one of the system's: {within}", flush=True)
dist.barrier()
dist.destroy_process_group()
