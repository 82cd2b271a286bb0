"""Examples in, batches out: data sets, tokenizers, tasks."""
