"""zero_redundancy: ddp whose optimizer state is divided among the ranks (ZeRO stage 1, within PyTorch).

Each rank updates its share of the parameters and sends them to the others (Rajbhandari et al. 2020, arXiv:1910.02054).
"""

from torch.distributed.optim import ZeroRedundancyOptimizer

from lockstep.strategies import ddp


class Strategy(ddp.Strategy):
    def prepare(self, model, make_optimizer):
        super().prepare(model, make_optimizer)
        whole = self.optimizer
        groups = [{name: group[name] for name in ("params", "weight_decay")} for group in whole.param_groups]
        settings = {name: whole.defaults[name] for name in ("lr", "betas", "eps", "fused")}
        self.optimizer = ZeroRedundancyOptimizer(groups, optimizer_class=type(whole), **settings)
