from threading import Thread

import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
computed = []


class Model(torch.nn.Module):
    def __init__(self, within):
        super().__init__()
        self.layer, self.within = torch.nn.Linear(4, 4), within

    def forward(self, inputs):
        with torch.autocast(device, torch.bfloat16) if self.within else torch.enable_grad():
            outputs = self.layer(inputs)
        computed.append(str(outputs.dtype).removeprefix("torch."))
        return outputs


def tried(name, call):
    computed.clear()
    call(torch.ones(4, 4, device=device))
    print(f"{name}: {' and '.join(computed)}")


around = torch.nn.DataParallel(Model(within=False).to(device))
within = torch.nn.DataParallel(Model(within=True).to(device))


def in_a_thread(inputs):
    thread = Thread(target=around.module, args=(inputs,))
    thread.start()
    thread.join()


with torch.autocast(device, torch.bfloat16):
    tried("around DataParallel", around)
    tried("around a thread of one's own", in_a_thread)
tried("within the model's forward", within)
