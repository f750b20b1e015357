"""From records to what people read: reading, ranking, summary, headline, charts and page."""
