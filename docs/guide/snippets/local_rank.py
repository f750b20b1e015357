import argparse
import os

parser = argparse.ArgumentParser()
# Both spellings: before PyTorch 2.0 it had an underscore.
parser.add_argument("--local-rank", "--local_rank", type=int)
given = parser.parse_args().local_rank
print(f"rank {os.environ['RANK']}: argument {given}, LOCAL_RANK {os.environ['LOCAL_RANK']}", flush=True)
