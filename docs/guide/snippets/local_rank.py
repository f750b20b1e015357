import argparse
import os

parser = argparse.ArgumentParser()
# Both: before PyTorch 2.0 it came with the underscore.
parser.add_argument("--local-rank", "--local_rank", type=int)
given = parser.parse_args().local_rank
print(f"rank {os.environ['RANK']}: argument {given}, LOCAL_RANK {os.environ['LOCAL_RANK']}", flush=True)
