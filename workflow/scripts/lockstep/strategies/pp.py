"""pp: pipeline parallelism: each rank of a replica holds some of the layers, and passes hidden states to the next rank.

A step's micro-batches (`accumulation`) go through the stages one after another, so that several ranks compute at the
same time. Either all forward passes come first and then all backward passes (GPipe, Huang et al. 2019,
arXiv:1811.06965), or forward and backward passes alternate, which keeps fewer activations (1F1B, Narayanan et al. 2019,
doi:10.1145/3341301.3359646), or each rank has several shorter stages in turn, which also shortens the wait at either
end (interleaved 1F1B, Narayanan et al. 2021, arXiv:2104.04473); torch.distributed.pipelining does all three. The ranks
of a replica see the same samples. Where there are several replicas, they average their gradients after the backward
passes.

Advantages: the model may be larger than one device; little is sent, one hidden state and its gradient between
neighbours.
Limits: with m micro-batches and n stages each rank waits (n - 1) / (m + n - 1) of the time, so m should be several
times n; interleaved stages wait less, and send more. The micro-batches of a step have one size. Layers are divided by
their number, whatever the head costs.
On a CPU: works through gloo; this shows that it works, not what it is worth.
"""

import copy
from dataclasses import replace

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from lockstep.errors import RunFailed
from lockstep.model import models
from lockstep.strategies import _group, ddp


class Strategy(ddp.Strategy):
    rehearses_average = False

    def start(self):
        world = super().start().in_replicas(self.options["stages"])
        self.stage = world.rank % self.options["stages"]
        last = self.stage == self.options["stages"] - 1
        self.world = replace(world, counts=last, loss_parts=int(last))
        return self.world

    def wrap(self):
        shape, names = (self.world.replicas, self.options["stages"]), ("replicate", "stage")
        self.mesh = init_device_mesh(self.world.device.type, shape, mesh_dim_names=names)
        self.pipelines = {}
        self.draws = self.stage  # so that stages do not drop the same units
        torch.manual_seed(torch.initial_seed() + self.draws)

    def set_up(self, model, make_optimizer):
        self.names = list(model.state_dict())  # of all stages, in the model's order
        require_plain_ends(model)
        # Taken before the model goes to the device, which may be too small for the whole of it.
        self.parts = divided(model, self.stage, self.options["stages"], self.chunks, self.autocast)
        super().set_up(model, make_optimizer)

    @property
    def chunks(self):
        """How many stages this rank has."""
        return self.options["chunks"] if self.options["pipeline"] == "interleaved" else 1

    def train(self, replay):
        replay.begin()
        for step in range(replay.done, replay.steps):
            batches = list(self.batches(replay, step))
            for batch, loss in zip(batches, self.through(replay, batches), strict=True):
                replay.trained(batch, loss)
            if self.world.replicas > 1:
                _group.average([weight.grad for weight in self.with_gradient()], self.mesh.get_group("replicate"))
            replay.gradients_ready(step)
            self.step()
            replay.schedule.step()
            replay.step_done(step)
        replay.end()

    def rehearse(self, replay, batch):
        self.through(replay, [batch] * self.accumulation)
        self.forget_gradients()

    def through(self, replay, batches):
        """Run micro-batches forward and backward. Returns the loss of each, or None on all stages but the last."""
        given, inputs = self.parts[0].divided({n: torch.cat([b.inputs[n] for b in batches]) for n in batches[0].inputs})
        pipeline = self.pipeline(len(batches), given, inputs)
        if not self.world.counts:
            pipeline.step(*given, **inputs)
            return [None] * len(batches)
        self.loss = lambda outputs, number: replay.loss(batches[int(number)], outputs)
        losses = []
        pipeline.step(*given, **inputs, target=torch.arange(len(batches)), losses=losses, return_outputs=False)
        return losses

    def pipeline(self, number, given, inputs):
        """The schedule for `number` micro-batches of these shapes; PyTorch makes a stage for fixed shapes."""
        key = (number, *(tensor.shape for tensor in (*given, *inputs.values())))
        if key not in self.pipelines:
            group, total = self.mesh.get_group("stage"), self.options["stages"] * self.chunks
            own = [PipelineStage(part, part.number, total, self.world.device, group=group) for part in self.parts]
            # The losses are parts of the mean already, so the number of micro-batches must not divide them once more.
            self.pipelines[key] = SCHEDULES[self.options["pipeline"]](
                own if self.options["pipeline"] == "interleaved" else own[0],
                number,
                loss_fn=lambda outputs, target: self.loss(outputs, target),
                scale_grads=False,
            )
        return self.pipelines[key]

    def forward(self, inputs):
        """In evaluation, a batch's hidden states go from stage to stage, and only the last stage has outputs."""
        outputs, ranks = None, self.options["stages"]
        first = self.world.rank - self.stage  # the rank of this replica's first stage
        for part in self.parts:
            given, others = part.divided(inputs)
            if not part.first and ranks > 1:
                tokens = next(iter(others.values()))
                shape = (len(tokens), tokens.shape[-1], self.module.config.hidden_size)
                outputs = torch.empty(shape, dtype=next(self.module.parameters()).dtype, device=self.world.device)
                dist.recv(outputs, src=first + (self.stage - 1) % ranks)
            outputs = part(*given, **others) if part.first else part(outputs, **others)
            if not part.last and ranks > 1:
                dist.send(outputs.contiguous(), dst=first + (self.stage + 1) % ranks)
        return outputs if self.world.counts else None

    def with_gradient(self):
        return [weight for weight in self.model.parameters() if weight.grad is not None]

    def gradient_norm(self):
        own = torch.nn.utils.get_total_norm([weight.grad for weight in self.with_gradient()])
        squares = own.square()
        dist.all_reduce(squares, group=self.mesh.get_group("stage"))
        return squares.sqrt()

    def step(self):
        if self.clip:
            torch.nn.utils.clip_grads_with_norm_(self.with_gradient(), self.clip, self.gradient_norm())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def live(self):
        layers = sum(len(part.layers) for part in self.parts)
        own = {"layers": layers, "own_stages": len(self.parts)}
        return {"backend": self.world.backend, "stages": self.mesh["stage"].size()} | own

    def state_dict(self):
        parts = [None] * self.options["stages"]
        own = {name: tensor.cpu() for name, tensor in self.module.state_dict().items()}
        dist.all_gather_object(parts, own, group=self.mesh.get_group("stage"))
        every = {name: tensor for part in parts for name, tensor in part.items()}
        return {name: every[name] for name in self.names}

    def save(self, folder):
        if self.world.replica == 0:
            save_file(self.module.state_dict(), folder / f"stage-{self.stage}.safetensors")

    @staticmethod
    def to_state_dict(folder):
        files = sorted(folder.glob("stage-*.safetensors"))
        return {name: tensor for file in files for name, tensor in load_file(file).items()}

    def save_state(self, folder):
        if self.world.replica == 0:
            weights = dict(self.module.named_parameters())
            state = {name: self.optimizer.state[weight] for name, weight in weights.items()}
            torch.save({"weights": weights, "optimizer": state}, folder / f"stage-{self.stage}.pt")

    def load_state(self, folder):
        """Load this rank's layers from the files of all stages, since another number of stages may have saved them."""
        files = [torch.load(file, map_location="cpu", weights_only=True) for file in folder.glob("stage-*.pt")]
        weights, state = ({k: v for file in files for k, v in file[kind].items()} for kind in ("weights", "optimizer"))
        for name, weight in self.module.named_parameters():
            weight.data.copy_(weights[name])
            # The number of steps too: the optimizer is fused, and keeps it where the weights are.
            self.optimizer.state[weight] = {key: value.to(weight.device) for key, value in state[name].items()}


SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}
# For models for which transformers has no plan: what comes before the layers, the layers, and what comes after them.
BERT = ("embeddings", "encoder.layer", "pooler")
PLANS = dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert"), BERT)
INHERITS = ("launcher",)
OPTIONS = {
    "stages": {
        "type": "integer",
        "minimum": 1,
        "default": 2,
        "description": "how many ranks hold a replica of the model together, each some of its layers; further ranks"
        " form further replicas, which share the batch",
    },
    "pipeline": {
        "enum": ["gpipe", "1f1b", "interleaved"],
        "default": "gpipe",
        "description": "`gpipe`: all forward passes, then all backward passes; `1f1b`: one of each in turn, which keeps"
        " fewer activations; `interleaved`: the same with several shorter stages on each rank, which wait less",
    },
    "chunks": {
        "type": "integer",
        "minimum": 2,
        "default": 2,
        "description": "how many stages each rank has with `pipeline: interleaved`",
    },
}
RANKS_PER_REPLICA = ("stages",)
DIVIDES_LAYERS = ("stages",)  # with interleaved stages also `chunks`, which each rank checks when it starts
RESUMES_WITH_OTHER = ("pipeline", "chunks")
EQUAL_SHARES = [({}, "stages pass on tensors of one shape")]
A_MICRO_BATCH_EACH = [({"pipeline": ["1f1b"]}, "each stage works on one of them; pipeline: gpipe takes fewer")]
ROUNDS_OF_MICRO_BATCHES = [({"pipeline": ["interleaved"]}, "its stages take them in rounds")]
UNCOUNTED = [({}, "each stage needs a different amount, and learns the shapes of its inputs from the stage before it")]
REFUSED = [
    (
        {"pipeline": ["gpipe", "1f1b"], "chunks": {"not": {"const": 2}}},
        "a rank has several stages only if they are interleaved; set pipeline: interleaved, or leave chunks out",
    ),
    (
        {"precision": ["fp16"]},
        "the loss is scaled on the last stage, and PyTorch's scaler looks at one rank's gradients"
        " only; use precision: bf16",
    ),
    ({"lora": {"minimum": 1}}, "its stages are parts of the plain model, without LoRA's updates; use fsdp or ddp"),
    (
        {"optimizer": ["muon"]},
        "Muon leaves out the layer that makes the outputs, which only the last stage knows; use tp or fsdp",
    ),
]


class Part(torch.nn.Module):
    """One stage of a model from transformers: the model without the layers of the other stages.

    The first stage takes tokens, the others hidden states; the last one returns scores. Its modules are the model's.
    """

    def __init__(self, model, number, total, autocast):
        super().__init__()
        own = layers_of_stage(model, number, total)
        self.number, self.first, self.last = number, number == 0, number == total - 1
        path = plan_of(model)[1]
        self.model = twin_of(model, f"{model.base_model_prefix}.{path}")
        keep(self.model, own, self.first, self.last)
        every = self.model.base_model.get_submodule(path)
        self.autocast, self.layers = autocast, [every[layer] for layer in own]

    def divided(self, inputs):
        """A model's inputs in two parts: those that the first stage takes in place of hidden states, and the others."""
        others = {name: tensor for name, tensor in inputs.items() if name != "input_ids"}
        return (inputs["input_ids"],) if self.first else (), others

    def forward(self, given, **inputs):
        name = "input_ids" if self.first else "inputs_embeds"
        with self.autocast():
            if self.last:
                return self.model(**{name: given}, **inputs).logits
            return self.model.base_model(**{name: given}, **inputs).last_hidden_state


def divided(model, rank, ranks, chunks, autocast):
    """The stages of one rank: every `ranks`-th one, from `rank` on. Takes all other layers out of `model`.

    Raises RunFailed if there are more stages than layers.
    """
    total, names = ranks * chunks, range(rank, ranks * chunks, ranks)
    layers = len(model.base_model.get_submodule(plan_of(model)[1]))
    if layers < total:
        asked = f"stages: {ranks}" + (f", chunks: {chunks}" if chunks > 1 else "")
        raise RunFailed(f"{asked}: the model has {layers} layers, and each stage needs at least one")
    parts = [Part(model, number, total, autocast) for number in names]
    own = {layer for number in names for layer in layers_of_stage(model, number, total)}
    keep(model, own, rank == 0, rank == ranks - 1)
    return parts


def layers_of_stage(model, number, total):
    """The numbers of the layers that a stage has."""
    layers = len(model.base_model.get_submodule(plan_of(model)[1]))
    return range(layers * number // total, layers * (number + 1) // total)


def keep(model, own, first, last):
    """Take all layers but `own` out of a model, in place; unless `first`, what comes before; unless `last`, after."""
    before, layers, after = plan_of(model)
    body = model.base_model
    every = body.get_submodule(layers)
    for number in range(len(every)):
        if number not in own:
            every[number] = Passed()
    if not first:
        setattr(body, before, Given())
    if not last:
        setattr(body, after, Passed())
        for name, child in list(model.named_children()):
            if child is not body:
                setattr(model, name, Passed())


def twin_of(model, path):
    """A copy of `model` that has the same modules; those along `path` can be replaced without changing `model`."""
    twin = copy.copy(model)
    twin._modules = dict(model._modules)
    name, _, rest = path.partition(".")
    if name:
        twin._modules[name] = twin_of(model._modules[name], rest)
    return twin


class Given(torch.nn.Module):
    """Takes the place of the embeddings on a stage that is given hidden states."""

    def forward(self, inputs_embeds=None, **others):
        return inputs_embeds


class Passed(torch.nn.Module):
    """Takes the place of what another stage computes: hidden states pass through unchanged."""

    def forward(self, hidden_states, *others, **named):
        return hidden_states


def plan_of(model):
    """The names, below the base model, of what comes before a model's layers, of the layers, and of what comes after.

    Raises RunFailed where they are not known, or where the first and the last stage would have a tensor in common.
    """
    config, name = getattr(model, "config", None), type(model).__name__
    if tied := models.tied_names(model):
        raise RunFailed(f"pp can't divide {name}: {min(tied)} is tied to another weight of the model, on another stage")
    plan = PLANS.get(getattr(config, "model_type", "")) or tuple(getattr(config, "base_model_pp_plan", None) or ())
    if len(plan) != 3:
        raise RunFailed(
            f"pp does not know how to divide the layers of {name}. It can divide BERT, RoBERTa, and models such as"
            " Llama, whose `base_model_pp_plan` in transformers has three parts: before the layers, the layers, after"
        )
    return plan


def require_plain_ends(model):
    """Raise RunFailed if a model changes hidden states just before or after its layers, as by a factor of embeddings.

    Each stage would do so again, because it runs the model's own forward pass without the layers of the others.
    """
    before, layers, after = plan_of(model)
    body, seen = model.base_model, {}
    every = body.get_submodule(layers)

    def watch(module, taken, made):
        def taking(module, inputs, named):
            seen[taken] = inputs[0] if inputs else named["hidden_states"]

        def making(module, inputs, outputs):
            seen[made] = outputs[0] if isinstance(outputs, tuple) else outputs

        hooks.append(taken and module.register_forward_pre_hook(taking, with_kwargs=True))
        hooks.append(made and module.register_forward_hook(making))

    hooks = []
    watch(getattr(body, before), None, "embeddings")
    watch(every[0], "first layer", None)
    watch(every[-1], None, "last layer")
    if getattr(body, after) is not None:  # a pooler may be left out
        watch(getattr(body, after), "end", None)
    training = model.training
    model.eval()  # so that no random number is drawn
    with torch.no_grad():
        outputs = body(input_ids=torch.ones((1, 2), dtype=torch.long))
    model.train(training)
    for hook in filter(None, hooks):
        hook.remove()
    end = seen.get("end", outputs.last_hidden_state)
    if not (torch.equal(seen["embeddings"], seen["first layer"]) and torch.equal(seen["last layer"], end)):
        raise RunFailed(
            f"pp can't divide {type(model).__name__}: it changes hidden states between its embeddings and its layers,"
            " or after them, which each stage would do again. Use fsdp or tp"
        )
