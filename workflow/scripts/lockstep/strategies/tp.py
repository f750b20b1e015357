"""tp: tensor parallelism: the ranks of a replica divide the attention heads and the MLP of every layer among them.

In attention as in the MLP, the first matrices are divided by columns and the last one by rows. Each of the two then
needs one all-reduce of its outputs in the forward pass, and one of its inputs' gradients in the backward pass (Shoeybi
et al. 2019, arXiv:1909.08053); PyTorch's DTensor and `parallelize_module` do this. Embeddings, norms and the head are
whole on each rank; with `vocabulary: true` each rank has the tokens' embeddings, and a language model's logits, of a
part of the vocabulary. The ranks of a replica see the same samples. Where there are several replicas, they average
their gradients after the backward pass, or, with `shard: true`, shard weights, gradients and optimizer state by FSDP2;
with `replicate: n` besides, they do so within n groups, which average their gradients. The mesh then has three axes.
With `sequence: true` the ranks divide the tokens wherever they would all compute the same within the layers: in norms,
dropout and residual sums (Korthikanti et al. 2022, arXiv:2205.05198). An all-reduce then becomes a reduce-scatter and
an all-gather, which send as much, and these activations are divided, too.

Advantages: weights, gradients, optimizer state and the activations within a layer are divided; samples need not be.
Limits: ranks wait for each other in every layer, so they need the fastest links; their number must divide the number of
heads.
On a CPU: works through gloo, which makes every layer's all-reduce slow; this shows that it works, not what it is worth.
"""

import contextlib
from fnmatch import fnmatch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from lockstep.errors import RunFailed
from lockstep.model import models
from lockstep.model.outputs import logits
from lockstep.strategies import _group, fsdp

STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
# The style in transformers' plans of weights that every rank holds whole, but uses for its own heads only, such as the
# norms of heads. Each rank's gradient of such a weight is one term of a sum over ranks.
SUMMED = "replicated_with_grad_allreduce"
BERT = {
    "encoder.layer.*.attention.self.query": "colwise",
    "encoder.layer.*.attention.self.key": "colwise",
    "encoder.layer.*.attention.self.value": "colwise",
    "encoder.layer.*.attention.output.dense": "rowwise",
    "encoder.layer.*.intermediate.dense": "colwise",
    "encoder.layer.*.output.dense": "rowwise",
}
DISTILBERT = {
    "transformer.layer.*.attention.q_lin": "colwise",
    "transformer.layer.*.attention.k_lin": "colwise",
    "transformer.layer.*.attention.v_lin": "colwise",
    "transformer.layer.*.attention.out_lin": "rowwise",
    "transformer.layer.*.ffn.lin1": "colwise",
    "transformer.layer.*.ffn.lin2": "rowwise",
}
# How to divide the layers of models for which transformers has no plan, in the form of its plans.
PLANS = dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert", "electra"), BERT) | {"distilbert": DISTILBERT}


class Strategy(fsdp.Strategy):
    @property
    def rehearses_average(self):
        return self.options["shard"]

    def place(self, model):
        return model.to(self.world.device)

    def start(self):
        self.world = super().start().in_replicas(self.options["tensor"])
        return self.world

    def wrap(self):
        replicas = self.world.replicas
        groups = self.options["replicate"] if self.options["shard"] else replicas
        shape = (groups, replicas // groups, self.options["tensor"])
        self.mesh = init_device_mesh(self.world.device.type, shape, mesh_dim_names=("replicate", "shard", "tensor"))
        every, body = plan_of(self.model), self.model.base_model
        # Found before the model is divided, since the sample may have a number of tokens that `sequence` can't divide.
        layers = fsdp.layers(self.model, self.inputs(self.sample)) if self.options["shard"] else []
        self.of_own_heads = modules_at(body, [path for path, style in every.items() if style == SUMMED])
        plan = {path: style for path, style in every.items() if style in STYLES}
        hidden = Shard(1) if self.options["sequence"] else Replicate()  # how ranks hold the hidden states, by tokens
        # Every rank has all weights already, so none sends them to the others (src_data_rank).
        kept = {"colwise": {"input_layouts": hidden}, "rowwise": {"output_layouts": hidden}}
        styles = {path: STYLES[style](**kept[style]) for path, style in plan.items()}
        parallelize_module(body, self.mesh["tensor"], styles, src_data_rank=None)
        gather_inputs(body, plan, self.mesh["tensor"], hidden)
        if self.options["sequence"]:
            divide_tokens(body, every, self.mesh["tensor"])
        if self.options["vocabulary"]:
            divide_vocabulary(self.model, self.mesh["tensor"])
        if self.options["tensor"] > 1 and any(models.dropouts(self.model)):
            draw_differently(body, plan, self.world.rank % self.options["tensor"], self.options["sequence"])
        if self.options["shard"]:
            mesh = self.mesh["replicate", "shard"] if groups > 1 else self.mesh["shard"]
            for module in (*layers, self.model):
                fully_shard(module, mesh=mesh)

    def set_up(self, model, make_optimizer):
        super().set_up(model, lambda wrapped: parted(make_optimizer(wrapped)))

    def autocast(self):
        return super(fsdp.Strategy, self).autocast()

    def padded_width(self, width):
        """With `sequence` the width is rounded up to a multiple of the number of ranks, which divide it evenly."""
        ranks = self.options["tensor"] if self.options["sequence"] else 1
        return -(-width // ranks) * ranks

    def forward(self, inputs):
        """In training, the logits of a divided vocabulary stay divided, for the loss; in evaluation they are joined."""
        outputs = super().forward(inputs)
        if self.model.training or not isinstance(logits(outputs), DTensor):
            return outputs
        return logits(outputs).full_tensor()

    def whole_loss(self, loss):
        return loss.full_tensor() if isinstance(loss, DTensor) else loss

    def averaging(self, last):
        if self.options["shard"]:
            super().averaging(last)
        return loss_parallel() if self.options["vocabulary"] else contextlib.nullcontext()

    def backward(self, loss, last):
        super().backward(loss, last)
        if last and self.options["sequence"] and not self.options["shard"]:
            for parameter in self.with_gradient():  # a norm's is still the sum over this rank's tokens only
                if isinstance(parameter.grad, DTensor):
                    parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
        if last:
            for gradient in (weight.grad for module in self.of_own_heads for weight in module.parameters()):
                own = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                dist.all_reduce(own, group=self.mesh.get_group("tensor"))
        if last and self.world.replicas > 1 and not self.options["shard"]:
            gradients = [parameter.grad for parameter in self.with_gradient()]
            own = [each.to_local() if isinstance(each, DTensor) else each for each in gradients]
            _group.average(own, self.mesh.get_group("replicate"))

    def with_gradient(self):
        return [parameter for parameter in self.model.parameters() if parameter.grad is not None]

    def gradient_norm(self):
        """The norm over all parts of divided tensors; a tensor that every rank holds whole counts once."""
        norms = [
            torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters])
            for parameters in by_mesh(self.with_gradient())
        ]
        return torch.stack([norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]).norm()

    def step(self):
        if self.clip:
            norm = self.gradient_norm()
            for parameters in by_mesh(self.with_gradient()):
                torch.nn.utils.clip_grads_with_norm_(parameters, self.clip, norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def live(self):
        meshes = [weight.device_mesh for weight in self.model.parameters() if isinstance(weight, DTensor)]
        divided = [mesh["tensor"].size() for mesh in meshes if "tensor" in mesh.mesh_dim_names]
        others = [m for m in self.model.modules() if not isinstance(m, torch.nn.Linear | torch.nn.Embedding)]
        return {
            "backend": self.world.backend,
            "tensor": min(divided),
            "divided_tensors": len(divided),
            "shard": any("shard" in mesh.mesh_dim_names for mesh in meshes),
            "replicate": max(mesh["replicate"].size() if "replicate" in mesh.mesh_dim_names else 1 for mesh in meshes),
            "sequence": any(map(is_divided, others)),
            "vocabulary": is_divided(self.model.get_input_embeddings()),
        }


OPTIONS = {
    "tensor": {
        "type": "integer",
        "minimum": 1,
        "default": 2,
        "description": "how many ranks hold a replica of the model together and divide its layers; further ranks form"
        " further replicas, which share the batch",
    },
    "shard": {
        "type": "boolean",
        "default": False,
        "description": "replicas also shard weights, gradients and optimizer state (FSDP2 over tp)",
    },
    "replicate": {
        "type": "integer",
        "minimum": 1,
        "default": 1,
        "description": "with shard, number of groups of replicas, each of which shards the whole model; 1: all replicas"
        " are one group",
    },
    "sequence": {
        "type": "boolean",
        "default": False,
        "description": "where ranks would all compute the same within the layers, each computes some of the tokens"
        " (sequence parallelism)",
    },
    "vocabulary": {
        "type": "boolean",
        "default": False,
        "description": "divide the embeddings of tokens, and a language model's logits and loss, by parts of the"
        " vocabulary",
    },
}
INHERITS = ("launcher",)
RANKS_PER_REPLICA = ("tensor",)
DIVIDES_RANKS = ("replicate", "tensor")
DIVIDES_HEADS = ("tensor",)
RESUMES_WITH_OTHER = ("shard", "sequence", "vocabulary")
REFUSED = [
    (
        {"vocabulary": [True], "label_smoothing": {"exclusiveMinimum": 0}},
        "PyTorch's loss over a divided vocabulary has no label smoothing; set vocabulary to false, or label_smoothing"
        " to 0",
    ),
    (
        {"shard": [False], "replicate": {"minimum": 2}},
        "without shard each replica is a group of its own; set shard: true, or leave replicate out",
    ),
    ({"lora": {"minimum": 1}}, "it divides layers, but would not divide peft's updates of them; use fsdp or ddp"),
]


def plan_of(model):
    """How each layer of a model from transformers is divided: paths below its base model, each with its style.

    Raises RunFailed where that is not known.
    """
    config = getattr(model, "config", None)
    plan = PLANS.get(getattr(config, "model_type", "")) or getattr(config, "base_model_tp_plan", None) or {}
    known = STYLES.keys() | {SUMMED}
    if not plan or not set(plan.values()) <= known:
        others = sorted(set(plan.values()) - known)
        why = f"its plan in transformers has {', '.join(others)}" if others else "transformers has no plan for it"
        raise RunFailed(
            f"tp does not know how to divide the layers of {type(model).__name__}: {why}. It can divide BERT, RoBERTa,"
            " ELECTRA, DistilBERT, and models that transformers divides by columns and rows, such as Llama and Qwen3"
        )
    return plan


def by_mesh(parameters):
    """Parameters in one list per mesh, and plain ones in another: PyTorch can't compute with a list of mixed kinds."""
    lists = {}
    for parameter in parameters:
        lists.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return list(lists.values())


def parted(optimizer):
    """An optimizer before its first step, with its groups divided so that each has parameters of one mesh only."""
    optimizer.param_groups[:] = [
        group | {"params": parameters} for group in optimizer.param_groups for parameters in by_mesh(group["params"])
    ]
    return optimizer


def gather_inputs(body, plan, mesh, hidden):
    """Where layers that are divided by columns have an input in common, pass it to all of them as one whole DTensor.

    Their gradients with respect to it are then added up first, and reduced over ranks once instead of once per layer.

    hidden: the placement of that input, which is whole on each rank or divided by tokens.
    """

    def as_one(module, inputs, named):
        if inputs:
            return (moved(inputs[0], mesh, hidden, Replicate()), *inputs[1:]), named
        return inputs, named | {"hidden_states": moved(named["hidden_states"], mesh, hidden, Replicate())}

    parents = [path.rpartition(".")[0] for path, style in plan.items() if style == "colwise"]
    shared = {parent for parent in parents if parents.count(parent) > 1}
    for name, module in body.named_modules():
        if any(is_at(name, parent) for parent in shared):
            module.register_forward_pre_hook(as_one, with_kwargs=True)


def moved(own, mesh, placement, to):
    """A DTensor with the placement `to`, made from `own`, which is what this rank holds of it by `placement`."""
    return DTensor.from_local(own, mesh, [placement], run_check=False).redistribute(placements=[to])


def divide_tokens(body, plan, mesh):
    """Divide the hidden states by tokens before the first layer, and join them again after the last one.

    In between each rank computes its own tokens where the plan divides nothing, as in norms.
    """

    def divided(layer, inputs):
        return moved(inputs[0], mesh, Replicate(), Shard(1)).to_local(), *inputs[1:]

    def joined(layer, inputs, outputs):
        own, *others = outputs if isinstance(outputs, tuple) else (outputs,)
        hidden = moved(own, mesh, Shard(1), Replicate()).to_local()
        return (hidden, *others) if isinstance(outputs, tuple) else hidden

    layers = layers_of(body, plan)
    for layer in layers:
        for path, module in layer.named_modules():
            in_plan = any(is_at(path, each.partition("*.")[2]) for each in plan)
            if not in_plan and list(module.parameters(recurse=False)):
                parallelize_module(module, mesh, SequenceParallel(use_local_output=True), src_data_rank=None)
    layers[0].register_forward_pre_hook(divided)
    layers[-1].register_forward_hook(joined)


def divide_vocabulary(model, mesh):
    """Divide the token embeddings, and the layer that computes logits if there is one, by parts of the vocabulary."""
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embeddings.weight
    if embeddings.padding_idx is not None:
        # PyTorch 2.13 would apply the number, which is of the whole vocabulary, to each rank's own part.
        part = embeddings.num_embeddings, mesh.size(), mesh.get_local_rank()
        embeddings.padding_idx = place_in_part(embeddings.padding_idx, *part)
    parallelize_module(embeddings, mesh, RowwiseParallel(input_layouts=Replicate()), src_data_rank=None)
    if head is not None:
        divided = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        parallelize_module(head, mesh, divided, src_data_rank=None)
    if tied:
        head.weight = embeddings.weight


def place_in_part(row, rows, parts, part):
    """The index of a row within one of the `parts` into which DTensor divides `rows`; None if it is in another part."""
    place = row - part * -(-rows // parts)
    return place if 0 <= place < -(-rows // parts) else None


def layers_of(body, plan):
    """The layers that a plan divides, in their order."""
    (stack,) = {path.partition(".*")[0] for path in plan}
    return list(body.get_submodule(stack))


def draw_differently(body, plan, part, by_tokens=False):
    """Let ranks drop different units where they compute different parts, and the same units where all compute the same.

    Between the layers that are divided by columns and the one that is divided by rows after them, each rank has heads
    of its own. With the random numbers of the replica, all ranks would drop the same units of their first heads. So
    each rank draws others there, from a seed that all ranks have drawn alike plus its own number, `part`. That way
    nothing more has to be saved. With `by_tokens` each rank has parts of its own in the whole of each layer.
    """
    kept = []

    def begin(module, inputs, outputs=None):
        if module.training:
            seed = int(torch.randint(2**62, ()))
            kept.append(random_states())
            torch.manual_seed(seed + part)

    def end(module, inputs, outputs=None):
        if module.training:
            set_random_states(kept.pop())

    if by_tokens:
        for layer in layers_of(body, plan):
            layer.register_forward_pre_hook(begin)
            layer.register_forward_hook(end)
        return
    before = "rowwise"
    for path, style in plan.items():
        for layer in (layer for name, layer in body.named_modules() if is_at(name, path)):
            if style == "rowwise":
                layer.register_forward_pre_hook(end)
            elif before == "rowwise":
                layer.register_forward_hook(begin)
        before = style


def is_divided(module):
    """Whether a module's own parameters lie on the mesh of the ranks of a replica."""
    weights = [weight for weight in module.parameters(recurse=False) if isinstance(weight, DTensor)]
    return any("tensor" in weight.device_mesh.mesh_dim_names for weight in weights)


def modules_at(body, paths):
    """The modules whose names match one of these paths."""
    return [module for name, module in body.named_modules() if any(is_at(name, path) for path in paths)]


def is_at(name, path):
    """Whether a module's name matches a path with asterisks."""
    return name.count(".") == path.count(".") and fnmatch(name, path)


def random_states():
    """The states of the random number generators of the host and of its current GPU."""
    return torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None


def set_random_states(states):
    host, gpu = states
    torch.set_rng_state(host)
    if gpu is not None:
        torch.cuda.set_rng_state(gpu)
