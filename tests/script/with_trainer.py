"""A script for transformers' Trainer: a classifier of generated texts of different lengths."""

import argparse
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


class Texts(Dataset):
    def __init__(self, count):
        generator = torch.Generator().manual_seed(1)
        lengths = torch.randint(4, 12, (count,), generator=generator).tolist()
        self.texts = [torch.randint(5, 100, (length,), generator=generator).tolist() for length in lengths]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        return {"input_ids": self.texts[index], "label": self.texts[index][0] % 3}


def padded(items):
    longest = max(len(item["input_ids"]) for item in items)
    ids = torch.tensor([item["input_ids"] + [0] * (longest - len(item["input_ids"])) for item in items])
    return {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "labels": torch.tensor([item["label"] for item in items]),
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--having", default=[], type=lambda words: words.split(","))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=100,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            num_labels=3,
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        asked = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2 if "accumulation" in arguments.having else 1,
            num_train_epochs=1,
            warmup_steps=2,
            average_tokens_across_devices="averaged" not in arguments.having,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        Trainer(model, asked, train_dataset=Texts(200), data_collator=padded).train()


if __name__ == "__main__":
    main()
