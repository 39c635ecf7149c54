"""Import what the ranks of a case import, once in the server that they are forked from."""

import gc
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
    # DeepSpeed's first engine imports it, and with it torch's compiler: four seconds of each rank.
    "deepspeed.runtime.zero.muon": "deepspeed.runtime.zero.muon.muon_optimizer",
}

for name in MODULES:
    importlib.import_module(name)
for package, name in OPTIONAL.items():
    root = package.partition(".")[0]
    if importlib.util.find_spec(root) is not None and importlib.util.find_spec(package) is not None:
        importlib.import_module(name)
logging.getLogger("torch.distributed").setLevel(logging.ERROR)
# What is imported stays: a full collection would look at all of it in every rank, which DeepSpeed's
# third stage asks for at each engine.
gc.collect()
gc.freeze()
