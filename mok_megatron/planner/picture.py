"""The machines as a picture, SVG or text: NVLink domains, nodes, GPUs with their rank, EP groups in colour."""

from __future__ import annotations

from mok_megatron.planner.cluster import Placement

PALETTE = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#edc948", "#76b7b2", "#e15759", "#9c755f")
TERMINAL_PALETTE = (25, 166, 28, 97, 136, 30, 160, 94)
"""The same in the 256 colours of a terminal, darker, for white digits."""
RESERVE = "#d9d9d9"
CELL, GAP, NODE_GAP, LABEL, MARGIN = 34, 2, 6, 64, 16
MAX_DOMAINS = 16
"""More domains than this would not fit a screen; the rest is mentioned below the picture."""


def rack_svg(place: Placement, *, ep: int, pp: int, title: str) -> str:
    """SVG text. A GPU's cell shows its rank; the stripe at its left the pipeline stage; grey GPUs run no rank."""
    gpu = place.cluster.gpu
    shown = min(place.cluster.domains, MAX_DOMAINS)
    # A rack is a column of trays; an HGX node is one wide row, so nodes are stacked.
    columns, rows = (shown, gpu.nodes_per_domain) if gpu.is_rack else (1, shown)
    width_of_node = gpu.node_gpus * CELL + LABEL
    width = MARGIN * 2 + columns * (width_of_node + NODE_GAP * 2)
    height = MARGIN * 2 + 44 + rows * (CELL + NODE_GAP) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{MARGIN}" y="{MARGIN + 8}" font-size="14" font-weight="bold">{_escaped(title)}</text>',
    ]
    top = MARGIN + 44
    for domain in range(shown):
        left = MARGIN + (domain * (width_of_node + NODE_GAP * 2) if gpu.is_rack else 0)
        if gpu.is_rack:
            parts.append(f'<text x="{left}" y="{top - 8}">rack {domain}</text>')
        for node in range(gpu.nodes_per_domain):
            row = node if gpu.is_rack else domain
            y = top + row * (CELL + NODE_GAP)
            name = f"tray {node}" if gpu.is_rack else f"node {domain}"
            parts.append(f'<text x="{left}" y="{y + CELL / 2 + 4:g}" fill="#555">{name}</text>')
            for slot in range(gpu.node_gpus):
                local = node * gpu.node_gpus + slot
                rank = domain * place.used + local if local < place.used else None
                parts.append(_cell(left + LABEL + slot * CELL, y, rank, ep, pp, place.world // pp))
    foot = height - MARGIN - 10
    note = f"one colour = one EP group of {ep} consecutive ranks; stripe = pipeline stage (of {pp}, black to white)"
    if place.spare_gpus:
        note += f"; grey = reserve, {place.spare_gpus} GPUs per {place.cluster.noun}"
    if shown < place.cluster.domains:
        note += f"; {place.cluster.domains - shown} more {place.cluster.noun}s alike"
    parts += [f'<text x="{MARGIN}" y="{foot}" fill="#333">{_escaped(note)}</text>', "</svg>"]
    return "\n".join(parts) + "\n"


def _cell(x: float, y: float, rank: int | None, ep: int, pp: int, per_stage: int) -> str:
    size = CELL - GAP
    if rank is None:
        return f'<rect x="{x}" y="{y}" width="{size}" height="{size}" rx="3" fill="{RESERVE}"/>'
    colour, stage = PALETTE[rank // ep % len(PALETTE)], rank // per_stage
    shade = round(255 * stage / max(1, pp - 1))  # black to white
    return (
        f"<g><title>rank {rank}, EP group {rank // ep}, pipeline stage {stage}</title>"
        f'<rect x="{x}" y="{y}" width="{size}" height="{size}" rx="3" fill="{colour}"/>'
        f'<rect x="{x}" y="{y}" width="5" height="{size}" fill="rgb({shade},{shade},{shade})"/>'
        f'<text x="{x + size / 2 + 2:g}" y="{y + size / 2 + 4:g}" text-anchor="middle" fill="white">{rank}</text></g>'
    )


def rack_text(place: Placement, *, ep: int, coloured: bool, most: int = 4) -> str:
    """The first ``most`` domains: a line per tray, a column per rack (HGX: a line per node); dots run no rank.

    ``coloured`` gives every EP group a background, for terminals.
    """
    gpu = place.cluster.gpu
    shown = min(place.cluster.domains, most if gpu.is_rack else 2 * most)
    width = len(str(place.world - 1)) + 1

    def node_text(domain: int, node: int) -> str:
        cells = []
        for local in range(node * gpu.node_gpus, (node + 1) * gpu.node_gpus):
            rank = domain * place.used + local if local < place.used else None
            text = f"{'.' if rank is None else rank:>{width}}"
            background = rank // ep % len(TERMINAL_PALETTE) if rank is not None else None
            if coloured and background is not None:
                text = f"\x1b[97;48;5;{TERMINAL_PALETTE[background]}m{text}\x1b[0m"
            cells.append(text)
        return "".join(cells)

    if gpu.is_rack:
        head = "".join(f"   {f'rack {domain}':<{width * gpu.node_gpus}}" for domain in range(shown))
        lines = [" " * 7 + head.rstrip()]
        for node in range(gpu.nodes_per_domain):
            trays = "".join("   " + node_text(domain, node) for domain in range(shown))
            lines.append(f"tray {node:<2d}{trays}")
    else:
        lines = [f"node {domain:<4d}{node_text(domain, 0)}" for domain in range(shown)]
    if shown < place.cluster.domains:
        lines.append(f"... and {place.cluster.domains - shown} more {place.cluster.noun}s alike")
    return "\n".join(lines)


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
