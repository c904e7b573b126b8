"""The plan as a table to read in a terminal."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_dcl.convert.rows import Plan, Row, Timing

__all__ = ["count", "render", "tabulate"]

WIDTH = 112


def render(plan: "Plan") -> str:
    """The table of a plan: what is converted, what could be, and why the rest is left alone."""
    chosen = plan.selected
    parts = []
    if chosen:
        parts.append(_units(chosen, measured=plan.device is not None))
    else:
        pays = any(row.status == "pays" for row in plan.rows)
        would = "at these widths" if any(row.paying_ratio for row in plan.rows) else ""
        parts.append("No unit is selected." if pays else f"Nothing here is worth converting {would}".strip() + ".")
    parts.append(_totals(plan))
    if chosen:
        parts.append(
            "≤: the paper's inequality u²·K1·ΣM + K2·ΣM ≤ u²·K1·K2. Low-rank: one branch of ΣM, equal weights."
        )
    if any(not row.within_half for row in chosen):
        parts.append("* ΣM is above K2/2, the paper's rule of thumb (which its own three branches of K2/5 break).")
    if sum(row.branches > 1 for row in chosen) > 4:
        parts.append(
            "From a random start the gradient grows with every converted layer in a row, 1.3 times at T = 2 and\n"
            "2.3 times at T = 3: clip it, use eps=1.0, or convert fewer (docs/numerics.md)."
        )
    others = [row for row in chosen if len(row.kernel) == 2 and not row.channels_last]
    if others:
        parts.append(
            "For a GPU call model.to(memory_format=torch.channels_last) first: 2-d convolutions are faster in that\n"
            f"format, and {len(others)} of these {'is' if len(others) == 1 else 'are'} in another."
        )
    grown = [row.name for row in chosen if row.weights_after > row.weights]
    if grown:
        parts.append(_wrapped("Larger than before: ", grown))
    idle = [row.name for row in plan.rows if row.status == "pays" and not row.selected]
    if idle:
        parts.append(_wrapped(f"Could be converted, not selected ({len(idle)}): ", idle))
    parts += [_left_alone(plan.rows), _paying_ratios(plan.rows)]
    return "\n".join(part for part in parts if part)


def _units(rows: Sequence["Row"], *, measured: bool) -> str:
    head = ["unit", "layer", "becomes", "weights", "after", "ratio", "MACs", "after", "ratio", "≤"]
    if measured:
        head += ["fwd ms", "after", "ratio", "fwd+bwd", "after", "ratio"]
    lines = [head]
    for row in rows:
        widths = f"{row.branches} x {row.widths[0]}" if len(set(row.widths)) == 1 else "+".join(map(str, row.widths))
        kernel = "x".join(map(str, row.kernel))
        layer = (
            f"{row.in_channels}→{row.out_channels}" + (f", {kernel}" if kernel else "") + (" BN" if row.norm else "")
        )
        sizes = [count(row.weights), count(row.weights_after), ratio(row.weights_after, row.weights)]
        macs = [count(row.macs), count(row.macs_after), ratio(row.macs_after, row.macs)]
        marks = (" stoch." if row.strategy == "stochastic" else "") + ("" if row.within_half else " *")
        lines.append([row.name, layer, f"DCL {widths}{marks}", *sizes, *macs, "yes" if row.smaller else "no"])
        low_rank = ["", "", f"low-rank {row.low_rank_width}", "", *sizes[1:], "", *macs[1:], ""]
        lines.append(low_rank)
        if measured:
            lines[-2] += _milliseconds(row.timings, "dcl", show_plain=True)
            lines[-1] += _milliseconds(row.timings, "low_rank", show_plain=False)
    return tabulate(lines, left=3)


def _milliseconds(timings: "Mapping[str, Timing] | None", contender: str, *, show_plain: bool) -> list[str]:
    if timings is None:
        return [""] * 6
    cells = []
    for before, after in zip(timings["plain"], timings[contender], strict=True):
        if before is None or after is None:
            cells += ["", "", ""]
        else:
            cells += [_ms(before) if show_plain else "", _ms(after), ratio(after, before)]
    return cells


def _totals(plan: "Plan") -> str:
    lines = [
        f"Weights (no biases): {plan.weights:,} → {plan.weights_after:,} "
        f"({_change(plan.weights_after, plan.weights)}). "
        f"Parameters: {plan.parameters:,} → {plan.parameters_after:,}.",
        f"MACs on {plan.example}: {count(plan.macs)} → {count(plan.macs_after)} "
        f"({_change(plan.macs_after, plan.macs)}).",
    ]
    if plan.timings:
        lines.append(_network_latency(plan))
    if plan.device:
        slower = [row.name for row in plan.selected if _slower(row.timings)]
        if slower:
            lines.append(_wrapped(f"Slower than the layer it replaces, on {plan.device} ({len(slower)}): ", slower))
    return "\n".join(lines)


def _network_latency(plan: "Plan") -> str:
    if plan.timings is None:
        return ""
    told, slower = _against(plan.timings["plain"], plan.timings["dcl"])
    lines = [f"Whole network on {plan.device}: {told}." + (" The converted network is slower." if slower else "")]
    if "dcl, captured" in plan.timings:
        told, by_itself = _against(plan.timings["plain, captured"], plan.timings["dcl, captured"])
        lines.append(f"The same as CUDA graphs, without launches: {told}.")
        waits = [what for what in slower if what not in by_itself]
        if waits:
            lines.append(f"It is launches that {' and '.join(waits)} waited for: compile the network, or capture it.")
    return "\n".join(lines)


def _against(plain: "Timing", dcl: "Timing") -> tuple[str, list[str]]:
    """Both times before and after, and which of them got longer."""
    parts, slower = [], []
    for what, before, after in zip(("forward", "forward + backward"), plain, dcl, strict=True):
        if before is not None and after is not None:
            parts.append(f"{what} {_ms(before)} → {_ms(after)} ms ({_change(after, before)})")
            slower += [what] if after > before else []
    return ", ".join(parts), slower


def _slower(timings: "Mapping[str, Timing] | None") -> bool:
    if timings is None:
        return False
    pairs = zip(timings["plain"], timings["dcl"], strict=True)
    return any(a is not None and b is not None and b > a for a, b in pairs)


def _left_alone(rows: Sequence["Row"]) -> str:
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.status != "pays" and not row.selected:
            reasons.setdefault(row.reason, []).append(row.name)
    if not reasons:
        return ""
    total = sum(map(len, reasons.values()))
    lines = [f"Left alone ({total}):"]
    lines += [_wrapped(f"  {reason} ({len(names)}): ", names) for reason, names in reasons.items()]
    return "\n".join(lines)


def _paying_ratios(rows: Sequence["Row"]) -> str:
    """The ratios at which units would shrink that do not, the widest first."""
    ratios: dict[float, list[str]] = {}
    for row in rows:
        if row.paying_ratio is not None:
            ratios.setdefault(row.paying_ratio, []).append(row.name)
    return "\n".join(
        _wrapped(f"Would shrink at ratio={ratio} or less ({len(names)}): ", names)
        for ratio, names in sorted(ratios.items(), reverse=True)
    )


def _wrapped(head: str, names: Sequence[str]) -> str:
    return textwrap.fill(head + ", ".join(names), WIDTH, subsequent_indent="    ", break_on_hyphens=False)


def tabulate(lines: Sequence[Sequence[str]], left: int) -> str:
    """Columns under a ruled head; the first ``left`` are aligned left, the others right."""
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
    """After over before, to two digits behind the point."""
    return f"{after / before:.2f}" if before else "–"


def _change(after: float, before: float) -> str:
    return f"{100 * (after / before - 1):+.1f} %" if before else "–"
