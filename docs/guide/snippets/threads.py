import time
from threading import Thread

import torch

torch.set_num_threads(1)
large = torch.nn.Linear(1024, 1024)
many = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(2000)))
works = {
    "one large layer": lambda: large(torch.ones(2048, 1024)),
    "2,000 small layers": lambda: many(torch.ones(8, 8)),
    "Python alone": lambda: sum(number * number for number in range(400_000)),
}


def shortest(run):
    seconds = []
    for _ in range(10):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def in_threads(work):
    # DataParallel starts one thread for each GPU, in each step.
    threads = [Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


for name, work in works.items():
    times = shortest(lambda work=work: in_threads(work)) / shortest(work)
    print(f"{name}: two threads take {times:.1f} times as long as one")
