"""transformers' Trainer. Start it by: torchrun --standalone --nproc-per-node 2 with_trainer.py"""

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


class Texts(Dataset):
    """Random texts, to be told apart by their first token."""

    def __init__(self):
        self.ids = torch.randint(5, 100, (512, 16), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        ids = self.ids[index]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": int(ids[0] > 50)}


torch.manual_seed(0)
sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
model = BertForSequenceClassification(BertConfig(vocab_size=100, num_labels=2, **sizes))
arguments = TrainingArguments(
    output_dir="trained",
    use_cpu=not torch.cuda.is_available(),
    per_device_train_batch_size=16,  # the batch of one rank
    num_train_epochs=2,
    dataloader_drop_last=True,
    average_tokens_across_devices=False,  # it would multiply a classifier's loss by the number of ranks
    save_strategy="no",
    report_to=[],
)
trainer = Trainer(model, arguments, train_dataset=Texts())
trainer.train()
trainer.save_model()  # by one process
