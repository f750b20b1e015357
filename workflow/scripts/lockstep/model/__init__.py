"""The model and its tokenizer, its optimizer and schedule, and how much work training it is."""
