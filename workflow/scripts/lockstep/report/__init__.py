"""From records to the report that people read: reading, ranking, summary, headline, charts and page."""
