"""From records to what people read: evaluation, summary, headline, charts and page."""
