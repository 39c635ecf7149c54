"""A tokenized dataset on disk: its manifest, its token files and their readers."""
