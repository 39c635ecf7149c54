"""Documents in, a tokenizer and token shards out."""
