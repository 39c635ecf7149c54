"""Laws of the event log: storages are counted once, from their first byte to their last."""

import torch

from llmsys.dryrun.memory_tracker import Allocation, MemoryTracker


def test_views_are_counted_once_and_freed_storages_not_at_all() -> None:
    tracker = MemoryTracker()
    x = torch.zeros(256, dtype=torch.float32)  # 1,024 bytes
    tracker.record(x, "a", "owner")
    tracker.record(x[:8], "b", "view")
    y = torch.zeros(1, dtype=torch.float32)  # rounded up to 512
    tracker.record(y, "b", "owner")
    assert tracker.live_bytes == 1_536
    del x
    assert tracker.live_bytes == 512
    assert tracker.find_peak() == (1_536, 1)
    assert tracker.compute_composition(1) == {
        Allocation("a", "owner", "float32 [256]"): 1_024,
        Allocation("b", "owner", "float32 [1]"): 512,
    }


def test_a_storage_that_is_resized_in_place_keeps_its_category() -> None:
    tracker = MemoryTracker()
    x = torch.zeros(256)
    tracker.record(x, "gathered", "fsdp")
    x.untyped_storage().resize_(0)
    tracker.record_resize(x.untyped_storage())
    assert tracker.live_bytes == 0
    x.untyped_storage().resize_(2_048)
    tracker.record_resize(x.untyped_storage())
    assert tracker.find_peak()[0] == tracker.live_bytes == 2_048
    assert sum(tracker.compute_composition(2).values()) == 2_048


def test_a_new_category_reaches_back_to_the_first_event() -> None:
    tracker = MemoryTracker()
    x, y = torch.zeros(128), torch.zeros(128)
    tracker.record(x, "forward", "f")
    start = tracker.num_events
    tracker.record(y, "forward", "g")
    tracker.set_live_category(start, "forward", "kept")
    tracker.set_category([x], "parameters", "p")
    assert tracker.compute_composition(1) == {
        Allocation("parameters", "p", "float32 [128]"): 512,
        Allocation("kept", "g", "float32 [128]"): 512,
    }


def test_the_timeline_keeps_the_peak_however_few_points_it_has() -> None:
    tracker = MemoryTracker()
    held = []
    for size in (1, 2, 50, 1):
        held.append(torch.zeros(size * 128))
        tracker.record(held[-1], "x", "")
        if size == 50:
            held.clear()
    peak = tracker.find_peak()[0]
    assert peak == 53 * 512
    assert max(sum(sizes.values()) for _, sizes in tracker.build_timeline(2)) == peak
    assert len(tracker.build_timeline(2)) == 2


def test_phases_and_a_share_of_a_category_are_found_by_event() -> None:
    tracker = MemoryTracker()
    tracker.mark_phase("forward")
    held = [torch.zeros(128) for _ in range(4)]
    for x in held:
        tracker.record(x, "kept", "")
    tracker.mark_phase("backward")
    del x
    while held:
        held.pop()
    assert tracker.get_phase(3) == "forward"
    assert tracker.get_phase(4) == "backward"
    assert tracker.find_share(4, 8, "kept", 0.5) == 5
