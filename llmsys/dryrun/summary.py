"""Format the result of a dry run for a terminal."""

from collections.abc import Iterator
from typing import Any

from llmsys.estimate.memory_timeline import GIB

NUM_OWNERS = 6
NUM_WAITS = 12
NUM_DIFFERENCES = 20


def format_dry_run(result: dict[str, Any]) -> str:
    """Return the result of one rank as text.

    Args:
        result: from `run_dry_run`.

    Returns:
        Lines for a terminal: verdict, memory, comparison with the estimate, collectives, waits,
        kernels, parameters.
    """
    return "\n".join(_iter_lines(result))


def format_fit(result: dict[str, Any]) -> str:
    """Return one line: whether the rank fits the memory of its device.

    Args:
        result: from `run_dry_run`.

    Returns:
        The verdict with bytes in GiB.
    """
    needed = result["needed_bytes"] / GIB
    capacity = result["capacity_bytes"] / GIB
    memory = result["memory"]
    verdict = "fits" if result["fits"] else "does not fit"
    missing = "" if result["fits"] else f", {needed - capacity:.1f} GiB too many"
    return (
        f"rank {result['rank']} of {result['world_size']} {verdict}: {needed:.1f} of "
        f"{capacity:.1f} GiB on {result['device']}{missing}; tensors hold "
        f"{memory['peak_bytes'] / GIB:.2f} GiB in {memory['peak_phase']}"
    )


def format_verdict(result: dict[str, Any]) -> str:
    """Return whether a rank fits, and what the comparison of its step with its config found.

    Args:
        result: from `run_dry_run`.

    Returns:
        Lines.
    """
    check = format_collective_check(result["collective_check"])
    check += format_block_check(result["block_check"])
    return "\n".join([format_fit(result), *(f"  {line}" for line in check)])


def format_block_check(check: dict[str, Any]) -> list[str]:
    """Return what the comparison of the work of blocks with the config found.

    Args:
        check: `block_check` of a result.

    Returns:
        Lines: a verdict, each difference, and what has no expectation.
    """
    verdict = "blocks run, multiply and wait as the config asks for"
    lines = _format_check(check, verdict, "the work that the config asks for")
    return lines + [f"{name} are not checked" for name in check["unchecked"]]


def _format_check(check: dict[str, Any], verdict: str, wanted: str) -> list[str]:
    """Return the verdict of a comparison, or its differences from what was wanted."""
    differences = check["differences"]
    if not differences:
        return [verdict]
    lines = [f"{len(differences)} differences from {wanted}:"]
    lines += [f"  {one}" for one in differences[:NUM_DIFFERENCES]]
    if len(differences) > NUM_DIFFERENCES:
        lines.append(f"  and {len(differences) - NUM_DIFFERENCES} more, which the page lists")
    return lines


def format_collective_check(check: dict[str, Any]) -> list[str]:
    """Return what the comparison of collectives and shards with the layout found.

    Args:
        check: `collective_check` of a result.

    Returns:
        Lines: a verdict, each difference, and what has no expectation.
    """
    verdict = "shards are those that the layout asks for; no collective is compared"
    if check["num_messages"]:
        verdict = (
            "collectives and shards are those that the layout asks for "
            f"({check['num_messages']:,} calls compared)"
        )
    lines = _format_check(check, verdict, "the collectives and shards that the layout asks for")
    return lines + [f"collectives of {name} are not checked" for name in check["unchecked"]]


def format_compiled_saving(result: dict[str, Any]) -> str:
    """Return what compiled blocks save of the peak.

    Args:
        result: from `run_dry_run`.

    Returns:
        A sentence with GiB; empty where blocks are not compiled or save nothing.
    """
    saving = result["compiled_saving_bytes"] / GIB
    text = (
        f"Blocks run eagerly here. Compiled, as in training, they hold {saving:.2f} GiB less by "
        "the estimate."
    )
    return text if saving else ""


def _iter_lines(result: dict[str, Any]) -> Iterator[str]:
    layout = ", ".join(f"{name}={size}" for name, size in result["layout"].items() if size != 1)
    micro = f"{result['micro_batches']} micro-batches of {result['micro_sequences']} sequences"
    yield f"{format_fit(result)}\n{layout or 'one rank'}; {result['precision']}; {micro}"
    if saving := format_compiled_saving(result):
        yield saving
    yield "\nmemory at the peak, GiB"
    for name, size in result["memory"]["categories"].items():
        if size > 1 << 20:
            yield f"  {size / GIB:8.2f}  {name}"
    yield "  largest storages"
    for owner in result["memory"]["owners"][:NUM_OWNERS]:
        yield (
            f"  {owner['bytes'] / GIB:8.2f}  {owner['tensor']:<28}  {owner['category']}, "
            f"{owner['owner'] or 'model'}"
        )
    yield from _iter_comparison_lines(result["estimate"])
    yield f"\n{'collectives of a step':<24}{'axis':<14}{'ranks':>6}{'count':>8}{'GiB':>10}"
    for one in result["collectives"]:
        yield (
            f"  {one['operation']:<22}{one['axis']:<14}{one['ranks']:>6}"
            f"{one['count']:>8}{one['bytes'] / GIB:>10.2f}"
        )
    yield from format_collective_check(result["collective_check"])
    yield ""
    yield from format_block_check(result["block_check"])
    yield from _iter_wait_lines(result)
    yield from _iter_kernel_lines(result)
    parameters = result["parameters"]
    yield (
        f"\nparameters: {parameters['own']:,} on this rank; the largest rank, "
        f"{parameters['largest_rank']}, holds {parameters['imbalance']:.3f} times the mean; "
        f"{len(parameters['kinds'])} kinds of ranks"
    )
    seconds = sum(result["seconds"].values())
    yield (
        f"dry run: {seconds:.0f} CPU seconds, {result['process_bytes'] / GIB:.2f} GiB of this "
        "machine's memory"
    )


def _iter_comparison_lines(estimate: dict[str, Any]) -> Iterator[str]:
    yield (
        f"\ncompared with llmsys estimate: {estimate['difference']:+.1%} of its "
        f"{estimate['peak_bytes'] / GIB:.2f} GiB ({estimate['peak_instant']})"
    )
    yield f"  {'phase and item':<44}{'dry run':>10}{'estimate':>10}{'more':>10}"
    for phase in estimate["phases"]:
        yield _format_comparison(phase["phase"], phase)
        for item in phase["items"]:
            if abs(item["dry_run_bytes"] - item["estimate_bytes"]) > phase["estimate_bytes"] / 100:
                yield _format_comparison(f"  {item['item']}", item)


def _format_comparison(name: str, row: dict[str, Any]) -> str:
    measured = row["dry_run_bytes"] / GIB
    estimated = row["estimate_bytes"] / GIB
    return f"  {name:<44}{measured:>10.2f}{estimated:>10.2f}{measured - estimated:>+10.2f}"


def _iter_wait_lines(result: dict[str, Any]) -> Iterator[str]:
    waits = result["waits"]
    yield (
        f"\nwaits of the host in a step of {result['recorded_micro_batches']} micro-batches: "
        f"{result['num_waits']}"
    )
    for one in waits[:NUM_WAITS]:
        yield f"  {one['count']:>6}  {one['cause']:<32}{one['line']}  {one['module']}".rstrip()
    if len(waits) > NUM_WAITS:
        yield (
            f"  {sum(one['count'] for one in waits[NUM_WAITS:]):>6}  at {len(waits) - NUM_WAITS} "
            "other lines"
        )
    if result["host_work"] is not None:
        yield _format_host_work(result["host_work"])


def _format_host_work(work: dict[str, float]) -> str:
    return (
        f"host work of a block and micro-batch, eager: {work['forward']:,.0f} operations forward "
        f"and {work['backward']:,.0f} backward, {1e3 * work['seconds']:.2f} ms at the launch time "
        "of the device's profile"
    )


def _iter_kernel_lines(result: dict[str, Any]) -> Iterator[str]:
    yield "\nattention kernels, and their operations of a step"
    for group in result["kernels"]:
        layers = f"{group['layers']} {group['stack']} layers of {group['attention']}"
        yield f"  {layers}: {group['kernel']}; {group['reason']}"
        if group["cost"]:
            yield f"    cost: {group['cost']}"
    for name, count in result["attention"].items():
        yield f"  {count:>6}  {name:<56}{result['flops'].get(name, 0) / 1e12:>10.1f} TFLOP"
    if flops := result["attention_flops"]:
        yield (
            f"  kernels compute {flops['ratio']:.3f} times the {flops['needed'] / 1e12:,.1f} "
            "TFLOP that the documents of this batch need, with whole tiles and padded widths"
        )
    yield _format_tables(result)
    compiled = result["compiled"]
    if compiled["signatures"]:
        variants = sum(compiled["signatures"].values())
        again = sum(compiled["recompiled"].values())
        yield (
            f"compiled blocks: {variants} input signatures, {again} of them first seen in the "
            "second step"
        )


def _format_tables(result: dict[str, Any]) -> str:
    if result["probe_length"] is None:
        return "  tables of positions by positions are not looked for: no probe fits this model"
    squares = result["squares"]
    text = (
        f"  tables of positions by positions: {sum(one['count'] for one in squares)} in a "
        "micro-batch"
    )
    if not squares:
        return text
    largest = max(squares, key=lambda one: int(one["count"]))
    return f"{text}, most by {largest['owner'] or 'the model'}: {largest['tensor']}"
