"""cp: context parallelism: the ranks of a replica divide each sequence's tokens, for texts too long for one device.

Each rank computes the hidden states of its own tokens, one after the other in the sequence. Only attention looks at
tokens of other ranks: each rank gathers the keys and values of all tokens, and its own queries attend to them (as
Llama 3 was trained, Grattafiori et al. 2024, arXiv:2407.21783, section 3.3.2). The backward pass adds up the gradients
of keys and values over ranks. Each rank has a part of the loss, so gradients are averaged over all ranks, and all of
them shard weights, gradients and optimizer state by FSDP2. Documents that share a sequence stay apart, because a mask
says what each token attends to.

Advantages: activations grow with a rank's own tokens, so texts may be as many times longer; the layers need no change.
Limits: keys and values of a whole sequence must fit on each device, while a layer computes. Only for language models of
transformers. Each rank has equally many tokens, but under a causal mask the first ones attend to less.
On a CPU: works through gloo; this shows that it works, not what it is worth.
"""

from dataclasses import replace

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from lockstep.errors import RunFailed
from lockstep.model.outputs import logits
from lockstep.strategies import fsdp


class Strategy(fsdp.Strategy):
    divides = False  # whether batches are divided among ranks, which begins when the model is wrapped

    def start(self):
        world = super().start().in_replicas(self.options["context"])
        self.world = replace(world, loss_parts=self.options["context"])
        return self.world

    def set_up(self, model, make_optimizer):
        require_attention_alone(model)
        super().set_up(model, make_optimizer)

    def wrap(self):
        super().wrap()
        shape = (self.world.replicas, self.options["context"])
        self.mesh = init_device_mesh(self.world.device.type, shape, mesh_dim_names=("replicate", "context"))
        attend_to_all_ranks(self.module, self.mesh["context"])
        self.part = self.mesh.get_local_rank("context")
        self.divides = True
        self.draws = self.part  # so that ranks do not drop the same units of their tokens
        torch.manual_seed(torch.initial_seed() + self.draws)

    def padded_width(self, width):
        """A multiple of the number of ranks, because all of them have equally many tokens."""
        ranks = self.options["context"]
        return -(-width // ranks) * ranks

    def inputs(self, arrays):
        return super().inputs(self.own_tokens(arrays) if self.divides and self.model.training else arrays)

    def own_tokens(self, batch):
        """A batch's arrays or tensors for this rank's tokens only; of the mask, the rows of these tokens."""
        width = batch["input_ids"].shape[1] // self.options["context"]
        own = slice(self.part * width, (self.part + 1) * width)
        return {
            name: values[:, :, own] if name == "attention_mask" else values[:, own] for name, values in batch.items()
        }

    def forward(self, inputs):
        """In training, the outputs for this rank's tokens; in evaluation, the logits for all of them, on every rank."""
        if self.model.training:
            return super().forward(inputs)
        return whole(logits(super().forward(self.own_tokens(inputs))), self.mesh["context"], dim=1)

    def live(self):
        return super().live() | {"context": self.mesh["context"].size()}


OPTIONS = {
    "context": {
        "type": "integer",
        "minimum": 1,
        "default": 2,
        "description": "how many ranks divide the tokens of a sequence among them; further ranks form further replicas,"
        " which share the batch",
    },
}
RANKS_PER_REPLICA = ("context",)
REFUSED = [
    (
        {"task": {"not": {"const": "language-modelling"}}},
        "it divides the tokens of a sequence, each of which has a target in language-modelling only; use fsdp",
    ),
]


def require_attention_alone(model):
    """Raise RunFailed unless attention is all in which a token depends on others, and `model`'s can be replaced.

    transformers lets the attention of most models be replaced. Some of them compute another kind of attention than the
    replacement, which for example does not cap scores and has no sinks; they are refused, too.
    """
    name, instead = type(model).__name__, "Use fsdp or tp"
    if not isinstance(model, PreTrainedModel) or not model._supports_attention_backend:
        raise RunFailed(
            f"cp can't reach the attention of {name}: it takes models of transformers whose attention may be chosen,"
            f" such as Llama. {instead}"
        )
    if not model._supports_sdpa:
        raise RunFailed(f"cp would change {name}, whose attention PyTorch's kernels do not compute. {instead}")
    if mixes_tokens(model):
        raise RunFailed(f"cp can't divide {name}: not only its attention looks at other tokens. {instead}")


def mixes_tokens(model):
    """Whether a token's outputs depend on other tokens even if attention returns each token's own value."""

    def attend(module, query, key, value, attention_mask, **options):
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2), None

    AttentionInterface.register("own_token", attend)
    AttentionMaskInterface.register("own_token", sdpa_mask)
    usual, training = model.config._attn_implementation, model.training
    model.config._attn_implementation = "own_token"
    model.eval()  # so that no random number is drawn
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        every, last = (
            logits(model(input_ids=own, position_ids=own, use_cache=False)) for own in (tokens, tokens[:, 4:])
        )
    model.train(training)
    model.config._attn_implementation = usual
    return not torch.allclose(every[:, 4:], last, rtol=1e-3, atol=1e-5)


def attend_to_all_ranks(model, mesh):
    """Have the model's attention gather keys and values over the ranks of a mesh, along the tokens."""

    def attend(module, query, key, value, attention_mask, **options):
        """Tensors are [batch, heads, own tokens, head width]; the mask is [batch, 1, own tokens, all tokens]."""
        key, value = whole(torch.stack([key, value]), mesh, dim=3)
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)

    AttentionInterface.register("context", attend)
    AttentionMaskInterface.register("context", sdpa_mask)
    model.config._attn_implementation = "context"


def whole(own, mesh, dim):
    """The ranks' parts of a tensor, joined along `dim`, on each rank.

    Each rank's gradient of it is a term of a sum: the backward pass adds them up, and returns this rank's part.
    """
    return DTensor.from_local(own, mesh, [Shard(dim)], run_check=False).full_tensor(grad_placements=[Partial()])
