"""Plain language-model training on a scheduled model: text, batches, the loop, what it prints."""
