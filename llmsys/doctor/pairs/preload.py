"""Import what the ranks of a case import, once in the server that they are forked from."""

import importlib
import importlib.util
import logging

MODULES = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining",
    "torch.nn.parallel",
    "llmsys.train.build_trainer",
    "llmsys.engine.torch_engine",
    "llmsys.engine.bitwise_engine",
    "llmsys.doctor.pairs.case_rank",
)
OPTIONAL = {
    "deepspeed": "llmsys.engine.deepspeed_engine",
    "accelerate": "llmsys.engine.accelerate_engine",
}

for name in MODULES:
    importlib.import_module(name)
for package, name in OPTIONAL.items():
    if importlib.util.find_spec(package) is not None:
        importlib.import_module(name)
logging.getLogger("torch.distributed").setLevel(logging.ERROR)
