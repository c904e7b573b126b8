"""The plan as a table for the terminal."""

import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_dcl.convert.rows import Plan, Row, Timing

__all__ = ["count", "render", "tabulate"]

WIDTH = 112
"""The maximum width of wrapped text."""


def render(plan: "Plan", width: int | None = None) -> str:
    """The table of a plan: the selected units, the units that could be converted, and reasons for all other layers.

    Without a width it has that of the terminal, or no limit without a terminal.
    """
    width = shutil.get_terminal_size((sys.maxsize, 0)).columns if width is None else width
    chosen = plan.selected
    parts, has_bound = [], False
    if chosen:
        table, has_bound = _units(chosen, width, times=_times(plan))
        parts.append(table)
    else:
        parts.append(_fitted(_nothing(plan), width))
    parts.append(_totals(plan, width))
    if chosen:
        bound = "≤: the paper's inequality u²·K1·ΣM + K2·ΣM ≤ u²·K1·K2. " if has_bound else ""
        parts.append(_fitted(f"{bound}Low-rank: one branch of ΣM, equal weights.", width))
    parts += [_fitted(note, width) for note in _notes(chosen)]
    grown = [row.name for row in chosen if row.weights_after > row.weights]
    if grown:
        parts.append(_wrapped("Larger than before: ", grown, width))
    idle = [row.name for row in plan.rows if row.status == "pays" and not row.selected]
    if idle:
        parts.append(_wrapped(f"Could be converted, not selected ({len(idle)}): ", idle, width))
    parts += [_left_alone(plan.rows, width), _paying_ratios(plan.rows, width)]
    return "\n".join(part for part in parts if part)


def _nothing(plan: "Plan") -> str:
    """Why no unit is selected."""
    if any(row.status == "pays" for row in plan.rows):
        return "No unit is selected."
    timed = {row.name: row.comparison for row in plan.rows if row.comparison}
    if plan.choice and timed:
        name = min(timed, key=lambda name: timed[name].ratio)
        best = f"the best unit, {name}, takes {timed[name]} of the plain one's time"
        if plan.choice.network:
            return f"No unit makes the network faster here: {best}, but the network {plan.choice.network}."
        return f"No unit is faster here: {best} ({plan.choice.step})."
    would = "at these widths" if any(row.paying_ratio for row in plan.rows) else ""
    return f"Nothing here is worth converting {would}".strip() + "."


def _times(plan: "Plan") -> list[str]:
    """The columns of times."""
    if plan.choice:
        return ["fwd+bwd" if plan.choice.phase == "train" else "fwd ms"]
    return ["fwd ms", "fwd+bwd"] if plan.device else []


def _notes(chosen: Sequence["Row"]) -> list[str]:
    """Remarks about the selected units."""
    notes = []
    if any(not row.within_half for row in chosen):
        notes.append("* ΣM is above K2/2, the paper's rule of thumb (which its own three branches of K2/5 break).")
    if sum(row.branches > 1 for row in chosen) > 4:
        notes.append(
            "From a random start the gradient grows with every converted layer in a row, 1.3 times at T = 2 and\n"
            "2.3 times at T = 3: clip it, use eps=1.0, or convert fewer (docs/numerics.md)."
        )
    others = [row for row in chosen if len(row.kernel) == 2 and not row.channels_last]
    if others:
        notes.append(
            "For a GPU call model.to(memory_format=torch.channels_last) first: 2-d convolutions are faster in that\n"
            f"format, and {len(others)} of these {'is' if len(others) == 1 else 'are'} in another."
        )
    return notes


_SHORTER = ("MACs", "≤", "weights", "fwd ms", "fwd+bwd", "layer")
"""The order in which a table that is too wide is reduced: a column, or a group of three columns to its ratio."""


def _units(rows: Sequence["Row"], width: int, *, times: Sequence[str]) -> tuple[str, bool]:
    """The table of units in at most ``width`` characters, and whether it has the column of the inequality."""
    for dropped in range(len(_SHORTER) + 1):
        lines, left = _cells(rows, _SHORTER[:dropped], times=times)
        excess = max(map(len, tabulate(lines, left).splitlines())) - width
        if excess <= 0:
            return tabulate(lines, left), "≤" in lines[0]
    room = max(8, max(len(line[0]) for line in lines) - excess)
    for line in lines[1:]:
        line[0] = line[0] if len(line[0]) <= room else "…" + line[0][1 - room :]
    return tabulate(lines, left), "≤" in lines[0]


def _cells(rows: Sequence["Row"], dropped: Sequence[str], *, times: Sequence[str]) -> tuple[list[list[str]], int]:
    """The cells, a head and two lines per unit, and the number of left-aligned columns."""
    head = ["unit"] + ([] if "layer" in dropped else ["layer"]) + ["becomes"]
    left = len(head)
    groups = ["weights", "MACs", *times]
    bound = ["≤"] if "≤" not in dropped else []
    for group in groups:
        head += [group] if group in dropped else [group, "after", "ratio"]
        head += bound if group == "MACs" else []
    lines = [head]
    for row in rows:
        widths = f"{row.branches} x {row.widths[0]}" if len(set(row.widths)) == 1 else "+".join(map(str, row.widths))
        kernel = "x".join(map(str, row.kernel))
        layer = (
            f"{row.in_channels}→{row.out_channels}" + (f", {kernel}" if kernel else "") + (" BN" if row.norm else "")
        )
        marks = (" stoch." if row.strategy == "stochastic" else "") + ("" if row.within_half else " *")
        ours, low_rank = [row.name, layer, f"DCL {widths}{marks}"], ["", "", f"low-rank {row.low_rank_width}"]
        if "layer" in dropped:
            del ours[1], low_rank[1]
        for group in groups:
            for line, contender in ((ours, "dcl"), (low_rank, "low_rank")):
                before, after, change = _before_and_after(row, group, contender)
                short = [f"×{change}" if change else ""]
                line.extend(short if group in dropped else [before if line is ours else "", after, change])
                if group == "MACs" and bound:
                    line.append(("yes" if row.smaller else "no") if line is ours else "")
        lines += [ours, low_rank]
    return lines, left


def _before_and_after(row: "Row", group: str, contender: str) -> tuple[str, str, str]:
    """The value of a unit before and after, and the ratio."""
    if group == "weights":
        return count(row.weights), count(row.weights_after), ratio(row.weights_after, row.weights)
    if group == "MACs":
        return count(row.macs), count(row.macs_after), ratio(row.macs_after, row.macs)
    if row.comparison and contender == "dcl":
        return _ms(row.comparison.plain), _ms(row.comparison.dcl), ratio(row.comparison.dcl, row.comparison.plain)
    if row.timings is None:
        return "", "", ""
    which = ("fwd ms", "fwd+bwd").index(group)
    before, after = row.timings["plain"][which], row.timings[contender][which]
    if before is None or after is None:
        return "", "", ""
    return _ms(before), _ms(after), ratio(after, before)


def _totals(plan: "Plan", width: int) -> str:
    lines = [
        f"Weights (no biases): {plan.weights:,} → {plan.weights_after:,} "
        f"({_change(plan.weights_after, plan.weights)}). "
        f"Parameters: {plan.parameters:,} → {plan.parameters_after:,}.",
        f"MACs on {plan.example}: {count(plan.macs)} → {count(plan.macs_after)} "
        f"({_change(plan.macs_after, plan.macs)}).",
    ]
    if plan.timings:
        lines += _network_latency(plan)
    if plan.choice and plan.choice.network and plan.selected:
        step, network = plan.choice.step, plan.choice.network
        lines.append(
            f"Whole network on {plan.device}, {step}: {_ms(network.plain)} → {_ms(network.dcl)} ms, {network} of plain."
        )
    lines = [_fitted(line, width) for line in lines]
    if plan.device:
        slower = [row.name for row in plan.selected if _slower(row)]
        if slower:
            lines.append(
                _wrapped(f"Slower than the layer it replaces, on {plan.device} ({len(slower)}): ", slower, width)
            )
    return "\n".join(lines)


def _network_latency(plan: "Plan") -> list[str]:
    if plan.timings is None:
        return []
    times, slower = _against(plan.timings["plain"], plan.timings["dcl"])
    lines = [f"Whole network on {plan.device}: {times}." + (" The converted network is slower." if slower else "")]
    if "dcl, captured" in plan.timings:
        times, by_itself = _against(plan.timings["plain, captured"], plan.timings["dcl, captured"])
        lines.append(f"The same as CUDA graphs, without launches: {times}.")
        waits = [what for what in slower if what not in by_itself]
        if waits:
            lines.append(f"It is launches that {' and '.join(waits)} waited for: compile the network, or capture it.")
    return lines


def _against(plain: "Timing", dcl: "Timing") -> tuple[str, list[str]]:
    """Both times before and after, and the names of those that increased."""
    parts, slower = [], []
    for what, before, after in zip(("forward", "forward + backward"), plain, dcl, strict=True):
        if before is not None and after is not None:
            parts.append(f"{what} {_ms(before)} → {_ms(after)} ms ({_change(after, before)})")
            slower += [what] if after > before else []
    return ", ".join(parts), slower


def _slower(row: "Row") -> bool:
    if row.comparison:
        return row.comparison.ratio > 1
    if row.timings is None:
        return False
    pairs = zip(row.timings["plain"], row.timings["dcl"], strict=True)
    return any(a is not None and b is not None and b > a for a, b in pairs)


def _left_alone(rows: Sequence["Row"], width: int) -> str:
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.status != "pays" and not row.selected:
            reasons.setdefault(row.reason, []).append(row.name)
    if not reasons:
        return ""
    total = sum(map(len, reasons.values()))
    lines = [f"Left alone ({total}):"]
    lines += [_wrapped(f"  {reason} ({len(names)}): ", names, width) for reason, names in reasons.items()]
    return "\n".join(lines)


def _paying_ratios(rows: Sequence["Row"], width: int) -> str:
    """The ratios at which further units would shrink, the largest first."""
    ratios: dict[float, list[str]] = {}
    for row in rows:
        if row.paying_ratio is not None:
            ratios.setdefault(row.paying_ratio, []).append(row.name)
    return "\n".join(
        _wrapped(f"Would shrink at ratio={ratio} or less ({len(names)}): ", names, width)
        for ratio, names in sorted(ratios.items(), reverse=True)
    )


def _wrapped(head: str, names: Sequence[str], width: int) -> str:
    return _filled(head + ", ".join(names), width)


def _fitted(text: str, width: int) -> str:
    """The text itself, or wrapped if one of its lines is too long."""
    return text if max(map(len, text.split("\n"))) <= width else _filled(text, width)


def _filled(text: str, width: int) -> str:
    width = max(20, min(width, WIDTH))
    return textwrap.fill(text, width, subsequent_indent="    ", break_on_hyphens=False, break_long_words=False)


def tabulate(lines: Sequence[Sequence[str]], left: int) -> str:
    """Columns under a ruled head; the first ``left`` columns are left-aligned, the others right-aligned."""
    sizes = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = []
    for line in lines:
        cells = [c.ljust(n) if i < left else c.rjust(n) for i, (c, n) in enumerate(zip(line, sizes, strict=True))]
        text.append("  ".join(cells).rstrip())
    return "\n".join([text[0], "─" * max(map(len, text)), *text[1:]])


def count(n: float) -> str:
    """A number in three or four digits: 812, 37.7k, 62.4M, 1.14G."""
    for unit in ("", "k", "M", "G", "T"):
        if abs(n) < 999.5 or unit == "T":
            return f"{n:.0f}" if not unit else f"{n:.3g}{unit}"
        n /= 1000
    return ""


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.3g}" if milliseconds < 999.5 else f"{milliseconds:.0f}"


def ratio(after: float, before: float) -> str:
    """After over before, with two decimals."""
    return f"{after / before:.2f}" if before else "–"


def _change(after: float, before: float) -> str:
    return f"{100 * (after / before - 1):+.1f} %" if before else "–"
