from torch import nn


class MyModel(nn.Module):
    """The mean of the words' vectors, and a layer over it: a bag of words."""

    def __init__(self, vocab_size: int, classes: int, width: int = 64):
        super().__init__()
        self.words = nn.Embedding(vocab_size, width)
        self.last = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, classes))

    def forward(self, input_ids, attention_mask, **_):
        counts = attention_mask.unsqueeze(-1).to(self.words.weight.dtype)  # 0 where a text is padded
        mean = (self.words(input_ids) * counts).sum(1) / counts.sum(1)
        return self.last(mean)
