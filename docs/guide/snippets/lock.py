import fcntl
import sys
import time
from pathlib import Path

with (Path(sys.argv[1]) / "lock-test").open("a") as file:
    try:
        # What PyTorch calls for each word that ranks exchange.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("kept out, as it should be: ranks may meet by file:// here")
    except OSError as error:
        print(f"no locks here ({error.strerror}): meet by tcp:// or env://")
    else:
        print("locked for 5 s: if another process, or machine, says so too, meet by tcp:// or env://", flush=True)
        time.sleep(5)
