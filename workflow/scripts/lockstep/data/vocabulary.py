"""Remarks on how a tokenizer fits the texts of a data set."""

import re
from collections import Counter

from lockstep.errors import listed

MANY_UNKNOWN = 0.03  # the share of unknown tokens above which there is a note


class Remarks:
    """Counts, while texts are tokenised, what the user should know: truncated texts, special tokens, unknown tokens."""

    def __init__(self, tokenizer):
        self.tokenizer, self.tokens, self.unknown, self.with_marks = tokenizer, 0, 0, 0
        self.texts, self.cut = 0, 0  # the number of texts, and of truncated texts
        self.ends: Counter[int] = Counter()  # the number of texts by their number of end-of-text tokens
        self.marks: Counter[str] = Counter()
        marks = set(tokenizer.all_special_tokens) if not tokenizer.split_special_tokens else set()
        self.mark = re.compile("|".join(map(re.escape, sorted(marks)))) if marks else None

    def add(self, texts: list[str], token_ids: list[list[int]]) -> None:
        self.tokens += sum(map(len, token_ids))
        if self.tokenizer.unk_token_id not in (None, self.tokenizer.eos_token_id):
            self.unknown += sum(ids.count(self.tokenizer.unk_token_id) for ids in token_ids)
        self.ends.update(ids.count(self.tokenizer.eos_token_id) for ids in token_ids)
        if self.mark:
            for text in texts:
                found = self.mark.findall(text)
                self.with_marks += bool(found)
                self.marks.update(found)

    def add_cut(self, texts: list[str], token_ids: list[list[int]]) -> None:
        """Count the texts that the tokenizer has truncated.

        Only texts with exactly the largest number of tokens are tokenised once more, without truncation.
        """
        self.texts += len(texts)
        longest = self.tokenizer.model_max_length
        full = [text for text, ids in zip(texts, token_ids, strict=True) if len(ids) >= longest]
        if full:
            whole = self.tokenizer(full, truncation=False, verbose=False)["input_ids"]
            self.cut += sum(len(ids) > longest for ids in whole)

    def notes(self) -> list[str]:
        notes = []
        if self.cut:
            notes.append(
                f"{self.cut} of {self.texts} texts have more than {self.tokenizer.model_max_length} tokens"
                " (data.max_length), and are truncated"
            )
        if self.with_marks:
            marks = listed(mark for mark, _ in self.marks.most_common())
            notes.append(
                f"{self.with_marks} texts contain {marks}, which the tokenizer reads as special tokens: a text may end"
                " there. Remove them from the data if they are not meant as such"
            )
        if self.tokens and self.unknown / self.tokens > MANY_UNKNOWN:
            share = f"{100 * self.unknown / self.tokens:.0f} %"
            notes.append(
                f"{share} of all tokens are {self.tokenizer.unk_token}, which stands for what the tokenizer does not"
                " know: check whether it is made for this language, and what data.join_blanks does to the texts"
            )
        return notes
