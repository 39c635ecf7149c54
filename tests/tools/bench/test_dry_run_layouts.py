"""The layouts of the comparison between dry runs and the estimate are legal, distinct, and use
every axis.
"""

from llmsys.config.loading.load import read_config
from llmsys.launch.commands.dryrun import build_request
from llmsys.launch.main import build_parser
from tools.bench.dry_run_layouts import ADDED, format_layout, list_layouts

AXES = ("replicate", "shard", "context", "tensor", "expert", "pipeline")


def test_at_least_20_legal_layouts_use_every_axis_alone_and_with_others() -> None:
    layouts = list_layouts()
    assert len({tuple(words) for words in layouts}) == len(layouts) >= 20
    used = set()
    for words in layouts:
        request = build_request(build_parser("dryrun").parse_intermixed_args([*words, *ADDED]))
        run = read_config(request.config, list(request.overrides)).run
        layout = run.resolve_layout(request.nodes * request.node_devices)
        assert layout.world_size == request.nodes * request.node_devices
        used |= {axis for axis in AXES if getattr(layout, axis) > 1}
    assert used == set(AXES)
    assert [words for words in list_layouts("pipeline") if "layout.pipeline=4" in words]


def test_a_row_has_both_peaks_and_their_difference() -> None:
    estimate = {"peak_bytes": 2 * 2**30, "difference": -0.05}
    result = {
        "estimate": estimate,
        "memory": {"peak_bytes": 1.9 * 2**30},
        "seconds": {"build": 1.0, "step": 2.0},
    }
    assert (
        format_layout(["model/a", "nodes=1:8"], result)
        == "| `model/a nodes=1:8` | 1.9 | 2.0 | -5.0% | 3 |"
    )
