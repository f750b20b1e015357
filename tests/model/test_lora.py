"""LoRA: which layers get an adapter, how it is initialised, and what the merged model and the adapter compute."""

from dataclasses import replace

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    FNetConfig,
    FNetForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    ViTConfig,
    ViTForImageClassification,
)

from lockstep.config import reading
from lockstep.config.sections import Train
from lockstep.errors import BadInput, RunFailed
from lockstep.model import convnets, lora, models
from lockstep.run import refusals

peft = pytest.importorskip("peft", reason="needs peft: make setup")
CPU = {"hardware": {"device": "cpu", "processes": 2, "threads": 1, "oversubscribe": True}}
SIZE = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}


def train(rank: int = 4, **asked) -> Train:
    return reading.parse(CPU | {"train": {"lora": rank} | asked, "rows": {"x": {"strategy": "ddp"}}}).train


def model() -> BertForSequenceClassification:
    """A small BERT with the same weights each time."""
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(vocab_size=200, num_labels=3, **SIZE))


def gpt2() -> GPT2LMHeadModel:
    """A model whose output layer is tied to its embedding."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=200, n_embd=32, n_layer=2, n_head=2, n_positions=32))


def vit() -> ViTForImageClassification:
    torch.manual_seed(0)
    return ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_channels=1, num_labels=3, **SIZE))


def basicnet() -> convnets.BasicNetBN:
    torch.manual_seed(0)
    return convnets.BasicNetBN(1, 8, 8, 3)


TOKENS, PIXELS = {"input_ids": torch.arange(60).reshape(5, 12)}, {"pixel_values": torch.rand(5, 1, 8, 8)}
MODELS = {
    "bert": (model, TOKENS, {}),
    "bert_named": (model, TOKENS, {"lora_alpha": 16, "lora_targets": ["query", "output.dense", "word_embeddings"]}),
    "bert_every": (model, TOKENS, {"lora_targets": ["all-linear"]}),
    "gpt2": (gpt2, TOKENS, {}),
    "gpt2_every": (gpt2, TOKENS, {"lora_targets": ["all-linear"]}),
    "vit": (vit, PIXELS, {"lora_targets": ["q_proj", "v_proj"]}),
    "basicnet_bn": (basicnet, PIXELS, {"lora_targets": ["conv2", "fc1"]}),
}


class Encoder(torch.nn.Module):
    """PyTorch's encoder layers, which read their weights directly in evaluation, without calling their modules."""

    def __init__(self, head: str):
        super().__init__()
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.before = torch.nn.Linear(16, 16)
        self.encoder = torch.nn.TransformerEncoder(layer, 2)
        setattr(self, head, torch.nn.Linear(16, 3))
        self.head = head

    def forward(self, pixel_values):
        states = self.encoder(self.before(pixel_values.flatten(1)[:, :64].view(-1, 4, 16)))
        return getattr(self, self.head)(states.mean(1))


def test_data_json_knows_the_layers_that_lora_can_update():
    there = lora.sizes(gpt2())
    assert all(
        lora.put_into(gpt2(), train(lora_targets=[path]))
        for path in [path for path in there if path.endswith("c_attn")]
    )
    assert not any(path.split(".")[-1] in lora.HEAD for path in lora.sizes(model()))
    assert all(size > 0 for size in there.values())


@pytest.mark.parametrize("head", ["classifier", "last"])
def test_pytorch_s_own_encoder_layers_heed_updates_in_evaluation_too(head):
    """PyTorch's fast path through them would skip the adapter."""
    torch.backends.mha.set_fastpath_enabled(True)
    live = trained(lora.put_into(Encoder(head), train(lora_alpha=64, lora_targets=["linear1", "linear2"])), PIXELS)
    said = scores(live, PIXELS)
    torch.backends.mha.set_fastpath_enabled(False)
    assert torch.equal(said, scores(live, PIXELS))


def test_a_network_s_last_linear_layer_is_its_head():
    live = lora.put_into(Encoder("last"), train(lora_targets=["linear1"]))
    whole = {name for name, weight in live.named_parameters() if weight.requires_grad and ".lora_" not in name}
    assert {name.split(".")[0] for name in whole} == {"last"}


def scores(network: torch.nn.Module, inputs: dict) -> torch.Tensor:
    outputs = network.eval()(**inputs)
    return getattr(outputs, "logits", outputs).detach()


def trained(network: torch.nn.Module, inputs: dict) -> torch.nn.Module:
    """This holds after some steps with dropout and batch statistics."""
    optimizer = torch.optim.AdamW([p for p in network.train().parameters() if p.requires_grad], lr=0.05)
    for _ in range(3):
        outputs = network(**inputs)
        getattr(outputs, "logits", outputs).float().flatten(0, -2).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return network


@pytest.mark.parametrize("name", MODELS)
def test_merged_weights_and_the_adapter_say_what_the_trained_model_says(tmp_path, name):
    make, inputs, asked = MODELS[name]
    start, live = make().state_dict(), lora.put_into(make(), train(**asked))
    assert type(live) is type(make())
    assert torch.equal(scores(live, inputs), scores(make(), inputs))  # before a step an update is zero
    trained(live, inputs)
    merged = lora.take_out(make(), live.state_dict(), train(**asked), tmp_path / "adapter")
    assert merged.keys() == start.keys()
    plain = make()
    plain.load_state_dict(merged, strict=True)
    assert (scores(plain, inputs) - scores(live, inputs)).abs().max() < 1e-4
    assert (scores(make(), inputs) - scores(live, inputs)).abs().max() > 1e-2
    assert {file.name for file in (tmp_path / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    by_peft = peft.PeftModel.from_pretrained(make(), tmp_path / "adapter")
    assert torch.equal(scores(by_peft, inputs), scores(live, inputs))


def test_an_adapter_that_does_not_come_to_the_live_weights_is_refused(tmp_path):
    live = lora.put_into(model(), train())
    with torch.no_grad():
        live.bert.embeddings.word_embeddings.weight.add_(1e-6)  # which LoRA freezes
    with pytest.raises(RunFailed, match=r"word_embeddings\.weight differs"):
        lora.take_out(model(), live.state_dict(), train(), tmp_path / "adapter")


def test_updates_begin_alike_on_every_rank_whose_dropout_differs():
    made, drawn = [], []
    for seed, each in enumerate((model(), model())):
        torch.manual_seed(seed)
        made.append(lora.put_into(each, train()).state_dict())
        drawn.append(torch.rand(1).item())
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])
    assert drawn[0] != drawn[1]


def test_an_update_counts_alpha_over_rank_times(tmp_path):
    start, asked = model().state_dict(), train(lora_alpha=8)
    live = lora.put_into(model(), asked)
    with torch.no_grad():
        for name, weight in live.named_parameters():
            if ".lora_" in name:
                weight.fill_(0.5)
    for name, weight in lora.take_out(model(), live.state_dict(), asked, tmp_path).items():
        added = 4 * 0.5 * 0.5 * 8 / 4 if name.endswith(("query.weight", "value.weight")) else 0.0
        torch.testing.assert_close(weight, start[name] + added)


def test_the_updates_and_the_head_are_trained_and_nothing_else():
    live = lora.put_into(model(), train())
    names = {name for name, parameter in live.named_parameters() if parameter.requires_grad}
    assert all(".lora_" in name or name.startswith(("classifier.", "bert.pooler.")) for name in names)
    assert lora.count_trained(live) == 2 * (4 * 32 + 32 * 4) + 32 * 32 + 32 + 3 * 32 + 3
    assert lora.count_trained(lora.put_into(model(), train(0))) == models.count_parameters(model())


def test_a_live_model_tells_its_updates():
    asked = train(8, lora_alpha=4, lora_dropout=0.25, lora_targets=["query", "attention.output.dense"])
    told = lora.live(lora.put_into(model(), asked))
    assert told == {"lora": 8, "lora_alpha": 4, "lora_dropout": 0.25, "lora_targets": ["dense", "query"]}
    assert told == lora.asked(asked)
    for change in ({"lora": 4}, {"lora_alpha": 8}, {"lora_dropout": 0.0}, {"lora_targets": ["query"]}):
        assert lora.live(lora.put_into(model(), replace(asked, **change))) != lora.asked(asked), change
    assert lora.live(model()) == lora.asked(train(0)) == {"lora": 0}
    assert models.dropouts(lora.put_into(model(), asked)) == models.dropouts(model())


REFUSED = {
    "a name that names nothing": (
        model,
        ["query", "qeury"],
        "lora_targets: qeury names no layer of the model. There are: dense, key, position_embeddings, query,",
    ),
    "the head": (model, ["classifier"], "lora_targets: classifier is the head, which is trained in full. There are: "),
    "a part of it": (model, ["pooler.dense"], "lora_targets: pooler.dense names no layer"),
    "tied weights": (gpt2, ["wte"], "lora_targets: wte: the weight of transformer.wte is tied to another layer's"),
    "what peft does not know": (
        lambda: FNetForSequenceClassification(FNetConfig(hidden_size=8, num_hidden_layers=1)),
        None,
        "lora: peft does not know which layers of FNetForSequenceClassification to update; name some of them by"
        " lora_targets: dense, ",
    ),
    "a network of its own": (basicnet, None, "name some of them by lora_targets: conv1, conv2, fc1"),
    "a word beside names": (model, ["all-linear", "query"], "lora_targets: all-linear stands alone"),
    "what its owner never calls": (lambda: Encoder("proj"), ["out_proj"], "lora_targets: out_proj names no layer"),
}


def test_a_target_that_names_nothing_is_refused_before_a_rank_starts():
    row = reading.parse(CPU | {"rows": {"x": {"strategy": "ddp", "lora": 4, "lora_targets": ["query", "qeury"]}}}).rows[
        "x"
    ]
    with pytest.raises(BadInput, match=r"rows\.x\.lora_targets: qeury names no layer .* There are: dense, key,"):
        refusals.refuse_lora_targets(row, lora.sizes(model()))
    right = replace(row, train=replace(row.train, lora_targets=["query", "output.dense"]))
    refusals.refuse_lora_targets(right, lora.sizes(model()))


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_t_be_updated_is_refused_in_words(case):
    make, targets, message = REFUSED[case]
    with pytest.raises(RunFailed) as refused:
        lora.put_into(make(), train(lora_targets=targets))
    assert message in str(refused.value)
