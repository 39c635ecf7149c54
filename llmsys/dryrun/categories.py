"""Categories of memory in a dry run."""

PARAMETERS, BUFFERS, MOMENTS = "parameters", "buffers", "optimizer state"
GRADIENTS, GATHERED, REDUCED = "gradients", "gathered weights", "gradients in reduction"
SAVED, FORWARD, LOSS, BACKWARD = (
    "activations",
    "temporaries of the forward",
    "loss",
    "temporaries of the backward",
)
UPDATE, EVALUATION, SAVING, BATCH = (
    "temporaries of the optimizer",
    "evaluation",
    "checkpoint",
    "batch and masks",
)
