"""pp: pipeline parallelism: each rank of a replica holds some of the layers, and hands hidden states on to the next.

A step's micro-batches (`accumulation`) go through the stages one behind the other, so that several ranks compute at a
time: first all forwards and then all backwards (GPipe, Huang et al. 2019, arXiv:1811.06965), or one forward and one
backward in turn, which keeps fewer activations (1F1B, Narayanan et al. 2019, doi:10.1145/3341301.3359646); by
torch.distributed.pipelining. Ranks of a replica see the same samples; replicas, where there are several, average their
gradients after the backward passes.

Advantages: a model larger than one device; what is sent is small, one hidden state and its gradient between neighbours.
Limits: with m micro-batches and n stages each rank waits (n - 1) / (m + n - 1) of the time, so m should be several n;
the micro-batches of a step have one size; layers are shared out by their number, whatever the head costs.
On a CPU: works through gloo; a test of function.
"""

from dataclasses import replace

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

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
        stages = self.options["stages"]
        if self.options["pipeline"] == "1f1b" and self.accumulation < stages:
            raise RunFailed(
                f"pipeline: 1f1b: {stages} stages want as many micro-batches at least, and accumulation is"
                f" {self.accumulation}; raise it, or take gpipe"
            )
        names = ("replicate", "stage")
        self.mesh = init_device_mesh(self.world.device.type, (self.world.replicas, stages), mesh_dim_names=names)
        self.pipelines = {}
        torch.manual_seed(torch.initial_seed() + self.stage)  # each stage drops other units

    def prepare(self, model, make_optimizer):
        self.names = list(model.state_dict())  # of all stages, in the model's order
        # Before it goes to the device, which may not hold all of it.
        self.part = Part(model, self.stage, self.options["stages"], self.autocast)
        super().prepare(model, make_optimizer)

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
        """Forward and backward of micro-batches; returns the loss of each, None on all stages but the last."""
        given, inputs = self.part.divided({n: torch.cat([b.inputs[n] for b in batches]) for n in batches[0].inputs})
        pipeline = self.pipeline(len(batches), given, inputs)
        if not self.world.counts:
            pipeline.step(*given, **inputs)
            return [None] * len(batches)
        self.loss = lambda outputs, number: replay.loss(batches[int(number)], outputs)
        losses = []
        pipeline.step(*given, **inputs, target=torch.arange(len(batches)), losses=losses, return_outputs=False)
        return losses

    def pipeline(self, number, given, inputs):
        """The schedule for as many micro-batches of these shapes, which PyTorch's stages are made for."""
        key = (number, *(tensor.shape for tensor in (*given, *inputs.values())))
        if key not in self.pipelines:
            group = self.mesh.get_group("stage")
            stage = PipelineStage(self.part, self.stage, self.options["stages"], self.world.device, group=group)
            # The losses are parts of the mean already: divided by the number of micro-batches once more they are wrong.
            self.pipelines[key] = SCHEDULES[self.options["pipeline"]](
                stage, number, loss_fn=lambda outputs, target: self.loss(outputs, target), scale_grads=False
            )
        return self.pipelines[key]

    def forward(self, inputs):
        """In evaluation: the hidden states of a batch go from stage to stage, and the last one has outputs."""
        given, inputs = self.part.divided(inputs)
        if self.stage:
            first = next(iter(inputs.values()))
            shape = (len(first), first.shape[-1], self.module.config.hidden_size)
            given = (torch.empty(shape, dtype=next(self.module.parameters()).dtype, device=self.world.device),)
            dist.recv(given[0], src=self.world.rank - 1)
        outputs = self.part(*given, **inputs)
        if self.world.counts:
            return outputs
        dist.send(outputs.contiguous(), dst=self.world.rank + 1)
        return None

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
        return {"backend": self.world.backend, "stages": self.mesh["stage"].size(), "layers": len(self.part.layers)}

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
        """Of all stages' files what this one has: there may have been more of them, or fewer."""
        files = [torch.load(file, map_location="cpu", weights_only=True) for file in folder.glob("stage-*.pt")]
        weights, state = ({k: v for file in files for k, v in file[kind].items()} for kind in ("weights", "optimizer"))
        for name, weight in self.module.named_parameters():
            weight.data.copy_(weights[name])
            # A step's number stays on the host, unless the optimizer is fused and the weights are not there.
            self.optimizer.state[weight] = {key: value.to(weight.device) for key, value in state[name].items()}


SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
# Of models for which transformers has no plan: what comes before the layers, these, and what comes after them.
BERT = ("embeddings", "encoder.layer", "pooler")
PLANS = dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert"), BERT)
INHERITS = ("launcher",)
OPTIONS = {
    "stages": {
        "type": "integer",
        "minimum": 1,
        "default": 2,
        "description": "how many ranks hold a replica of the model together, each some of its layers; what is left of"
        " the ranks is more replicas, which share the batch",
    },
    "pipeline": {
        "enum": ["gpipe", "1f1b"],
        "default": "gpipe",
        "description": "all forwards and then all backwards, or one of each in turn, which keeps fewer activations",
    },
}
RANKS_PER_REPLICA = ("stages",)
EQUAL_SHARES = [({}, "stages hand on tensors of one shape")]
REFUSED = [
    (
        {"precision": ["fp16"]},
        "the loss is scaled on the last stage, and PyTorch's scaler looks at one rank's gradients"
        " only; take precision: bf16",
    ),
    ({"lora": {"minimum": 1}}, "its stages are parts of the plain model; take fsdp or ddp"),
    ({"optimizer": ["muon"]}, "which layer makes the outputs is known on the last stage only; take tp or fsdp"),
]


class Part(torch.nn.Module):
    """What one stage computes of a model of transformers', whose other layers are taken out of it.

    The first stage begins with tokens, the others with hidden states; the last one returns scores. Names stay.
    """

    def __init__(self, model, stage, stages, autocast):
        super().__init__()
        before, layers, after = plan_of(model)
        body = model.base_model
        every = body.get_submodule(layers)
        if len(every) < stages:
            raise RunFailed(f"stages: {stages}: the model has {len(every)} layers, and each stage needs one")
        own = range(len(every) * stage // stages, len(every) * (stage + 1) // stages)
        for number in range(len(every)):
            if number not in own:
                every[number] = Passed()
        self.first, self.last = stage == 0, stage == stages - 1
        if not self.first:
            setattr(body, before, Given())
        if not self.last:
            setattr(body, after, Passed())
            for name, child in list(model.named_children()):
                if child is not body:
                    setattr(model, name, Passed())
        self.model, self.autocast, self.layers = model, autocast, [every[number] for number in own]

    def divided(self, inputs):
        """Of a model's inputs those that the first stage is given in place of hidden states, and the others."""
        others = {name: tensor for name, tensor in inputs.items() if name != "input_ids"}
        return (inputs["input_ids"],) if self.first else (), others

    def forward(self, given, **inputs):
        name = "input_ids" if self.first else "inputs_embeds"
        with self.autocast():
            if self.last:
                return self.model(**{name: given}, **inputs).logits
            return self.model.base_model(**{name: given}, **inputs).last_hidden_state


class Given(torch.nn.Module):
    """In place of embeddings, on a stage that is given hidden states."""

    def forward(self, inputs_embeds=None, **others):
        return inputs_embeds


class Passed(torch.nn.Module):
    """In place of what another stage computes: hidden states go through."""

    def forward(self, hidden_states, *others, **named):
        return hidden_states


def plan_of(model):
    """The names of what comes before a model's layers, of these, and of what comes after; below its base model.

    Raises RunFailed where they are not known, or where the first and the last stage have one tensor in common.
    """
    config, name = getattr(model, "config", None), type(model).__name__
    if tied := models.tied_names(model):
        raise RunFailed(
            f"pp can't divide {name}: {min(tied)} is another tensor of the model, which two stages would have"
        )
    plan = PLANS.get(getattr(config, "model_type", "")) or tuple(getattr(config, "base_model_pp_plan", None) or ())
    if len(plan) != 3:
        raise RunFailed(
            f"pp does not know how to divide the layers of {name}. It does BERT, RoBERTa, and those that transformers"
            " divides into what comes before the layers, these, and what comes after, as Llama"
        )
    return plan
