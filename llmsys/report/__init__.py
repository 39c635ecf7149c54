"""Reports: what a dataset or a run was, as one self-contained HTML page."""
